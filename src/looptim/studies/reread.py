"""Committed results read again with the statistics of today: `python -m looptim.studies.reread docs/results`.

With `--figure FILE.png` the losses minus that of the plain loop are drawn instead, a panel for each study.

The runs of old studies are gone, but `results.json` has every seed's last validation loss and exact match, which is all
that the two-way model of `statistics` needs.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from ..recipe import shipped
from ..reporting.plots import Picture, axes_of, render
from ..reporting.style import styles_of
from ..reporting.tables import Cell, Table, markdown
from .archive import ARCHIVE
from .statistics import MOST_SEEDS, Estimate, check, differences, estimate, fit, seeds_needed

MEASURES = {"loss": ("{:+.4f}", 1), "exact_match": ("{:+.1f}", 100)}
"""How a difference in each is printed, and its unit: nats per token, percent."""


def reread(folder: Path) -> Table | None:
    """Every variant against the reference and against its twin, or None where there is one variant or one seed."""
    found = _read(folder)
    rows: list[list[str | Cell]] = []
    notes: list[str] = []
    for measure in MEASURES:
        values = {name: _seeds(row.get(measure)) for name, row in found["variants"].items()}
        model = fit(values)
        if len(model.table) < 2 or not model.df:
            continue
        for kind, pairs in _pairs(found, list(model.table)).items():
            for (ours, theirs), value in differences(model, pairs).items():
                if value is not None:
                    needed = seeds_needed(value.mean, model, len(pairs))
                    rows.append([f"{ours} − {theirs}", measure, kind, *_cells(value, measure, needed)])
        tested = check(model)
        doubt = (
            "" if tested is None else f", equal spread p = {tested.spread:.2g}, additive p = {tested.additivity:.2g}"
        )
        scale = MEASURES[measure][1]
        notes.append(f"{measure}: residual sd {scale * model.sd:.4g}, {model.df} df{doubt}.")
    notes.append(
        "The runs' logs are in its runs.zip: tables and figures can be made again."
        if (folder / ARCHIVE).is_file()
        else "The runs' logs are lost: only what results.json has can be read again."
    )
    header = ["difference", "measure", "family", "mean", "± of its own seeds alone", "verdict", "seeds to see it"]
    title = f"{folder.name} ({found['tokens']:,} tokens a run)"
    return Table(folder.name, title, header, rows, notes, error="half_width_95", labels=3) if rows else None


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def _seeds(estimate: Mapping[str, Any] | None) -> dict[int, float]:
    return dict(enumerate(estimate["values"])) if estimate else {}


def _pairs(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """The two families of comparisons, each with intervals that hold together."""
    path = shipped("studies").get(found["study"])
    study = tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
    reference = found.get("reference") or study.get("reference") or names[0]
    twins = {name: variant.get("against") for name, variant in study.get("variants", {}).items()}
    pairs = {
        "to the reference": [(name, reference) for name in names if name != reference],
        "to its twin": [(name, twin) for name, twin in twins.items() if name in names and twin in names],
    }
    return {kind: some for kind, some in pairs.items() if some}


def _cells(value: Estimate, measure: str, needed: int | None) -> list[str | Cell]:
    """The difference, what the seeds of this pair alone would say, the verdict, and what would see it."""
    form, scale = MEASURES[measure]
    alone = estimate(value.values)
    halves = [None if each is None or each.half is None else scale * each.half for each in (value, alone)]
    verdict = ("less" if value.mean < 0 else "more") if value.is_seen else "cannot tell"
    seen_alone = alone is not None and alone.is_seen
    change = "" if seen_alone == value.is_seen else ", fell" if seen_alone else ", appeared"
    seeds = f"> {MOST_SEEDS}" if needed is None else str(needed)
    own = Cell(halves[1], form=form.replace("+", ""))
    return [Cell(scale * value.mean, halves[0], form=form), own, verdict + change, seeds]


HEAD = """# The results, read again

<!-- made by `python -m looptim.studies.reread docs/results` -->

Every difference of the committed studies by the two-way model, variant + seed + residual, with the residual of all
variants of a study and intervals that hold for a whole family of comparisons at once (after Dunnett). Beside it
stands the half-width that the three differences of a pair alone would give (Student), which is what these studies
were first read with: a difference that was seen by that and is no more "fell", one that is seen only now "appeared".
"""


def forest(folders: Sequence[Path], reference: str = "vanilla") -> Picture:
    """The losses of all variants minus the reference's, a panel for each study that has it as its reference."""
    panels = {}
    for folder in folders:
        found = _read(folder)
        model = fit({name: _seeds(row.get("loss")) for name, row in found["variants"].items()})
        pairs = _pairs(found, list(model.table)).get("to the reference", [])
        if model.df and pairs and pairs[0][1] == reference:
            panels[f"{folder.name}, {found['tokens'] / 1e6:.1f} M tokens"] = differences(model, pairs)
    x = f"loss minus {reference} (nats per token)"
    figure, grid = axes_of("Against the plain loop", "", list(panels), xlabel=x, sharey=False)
    for axes, found in zip(grid, panels.values(), strict=True):
        names = [ours for ours, _ in found]
        for row, (value, style) in enumerate(zip(found.values(), styles_of(names), strict=True)):
            if value is not None:
                axes.errorbar(value.mean, row, xerr=value.half, color=style["color"], marker=style["marker"], capsize=3)
        axes.axvline(0, color="gray", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    most = max(map(len, panels.values()))
    figure.set_size_inches(7.2, 1.0 + -(-len(panels) // 2) * (0.5 + 0.22 * most))
    return Picture("forest", "95% intervals that hold for all variants of a study at once.", figure)


def folders_of(roots: Sequence[str | Path]) -> list[Path]:
    """Every folder of results below others."""
    return sorted(file.parent for root in roots for file in Path(root).glob("**/results.json"))


def main(roots: Sequence[str | Path]) -> str:
    """The tables of all results below the folders, as a page."""
    return HEAD + "\n" + markdown([table for folder in folders_of(roots) if (table := reread(folder)) is not None])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("roots", nargs="+")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    if given.figure is None:
        print(main(given.roots), end="")
    else:
        given.figure.write_bytes(render(lambda: [forest(folders_of(given.roots))])[1]["forest.png"])
