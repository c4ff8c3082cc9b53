"""Committed results read again with the statistics of today: `python -m looptim.studies.reread docs/results`.

The runs of old studies are gone, but `results.json` has every seed's last validation loss and exact match, which is all
that the two-way model of `statistics` needs.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..recipe import shipped
from ..reporting.tables import Cell, Table, markdown
from .statistics import MOST_SEEDS, Estimate, check, differences, estimate, fit, seeds_needed

MEASURES = {"loss": ("{:+.4f}", 1), "exact_match": ("{:+.1f}", 100)}
"""How a difference in each is printed, and its unit: nats per token, percent."""


def reread(folder: Path) -> Table | None:
    """Every variant against the reference and against its twin, or None where there is one variant or one seed."""
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
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
    header = ["difference", "measure", "family", "mean", "± of its own seeds alone", "verdict", "seeds to see it"]
    title = f"{folder.name} ({found['tokens']:,} tokens a run)"
    return Table(folder.name, title, header, rows, notes, error="half_width_95", labels=3) if rows else None


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


def main(folders: Sequence[str]) -> str:
    """The tables of all results below the folders, as a page."""
    files = sorted(file for folder in folders for file in Path(folder).glob("**/results.json"))
    return HEAD + "\n" + markdown([table for file in files if (table := reread(file.parent)) is not None])


if __name__ == "__main__":
    print(main(sys.argv[1:]), end="")
