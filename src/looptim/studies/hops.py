"""Chained assignments: what runs solve, by required hops and by loops run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..data import open_data
from ..data.deref import DerefDataset, shortcut_scores
from ..model.count import training_flops
from ..reporting.page import numbers
from ..reporting.plots import Picture
from ..reporting.tables import Cell, Table
from ..rundir import Run
from .measures import Outcome
from .spec import Plan
from .tables import HALF_WIDTH

SOLVED = 0.9
"""The share of right answers from which a number of hops counts as solved."""


def hop_tables(plan: Plan, found: Sequence[Outcome]) -> list[Table]:
    """The share of right answers by hops, at the trained depth and at others; empty for other tasks."""
    done = [outcome for outcome in found if outcome.hops]
    if not done:
        return []
    return [_by_hops(plan, done), *_by_loops(plan, done)]


def loops_of(plan: Plan, variant: str) -> int:
    """The number of loops a variant is trained with; 1 if it is not looped."""
    return next((s.loops for s in plan.config(variant).model.segments if s.loops is not None), 1)


def shares(plan: Plan, outcome: Outcome, loops: int | None = None) -> np.ndarray | None:
    """Right answers by hops, one row per seed, at the trained depth or another; None if that was not measured."""
    key = str(loops_of(plan, outcome.variant) if loops is None else loops)
    rows = [seed[key] for seed in outcome.hops.values() if key in seed]
    return np.array(rows) if rows else None


def _by_hops(plan: Plan, done: Sequence[Outcome]) -> Table:
    rows: list[list[str | Cell]] = []
    for outcome in done:
        seen = shares(plan, outcome)
        assert seen is not None
        updates, cost = _time_to_solve(plan, outcome)
        numbers = [Cell(100 * share, form="{:.0f}") for share in seen.mean(0)]
        rows.append([outcome.variant, Cell(float(seen.sum(1).mean()), form="{:.1f}"), *numbers, updates, cost])
    number = len(rows[0]) - 4
    for name, scores in _shortcuts(plan).items():
        numbers = [Cell(100 * score, form="{:.0f}") for score in scores]
        rows.append([f"*{name}*", Cell(sum(scores), form="{:.1f}"), *numbers, Cell(None), Cell(None)])
    header = ["right answers by hops (%)", "sum", *map(str, range(number)), "updates to 90%", "FLOPs to 90%"]
    notes = [
        "Means over seeds, on held-out problems; the sum is of the shares, over all hops. The last rows are what "
        "shortcuts score. R loops can follow R hops one after another, or 2^R - 1 by pointer doubling.",
        "Updates and FLOPs until 90% of the answers that need at most R hops are right, the median over seeds, counted "
        "at validations; – where half of the runs do not get there.",
    ]
    title = "Right answers by hops, at the trained depth"
    return Table("hops", title, header, rows, notes, error=HALF_WIDTH, labels=1)


def _time_to_solve(plan: Plan, outcome: Outcome) -> tuple[Cell, Cell]:
    config, loops = plan.config(outcome.variant), loops_of(plan, outcome.variant)
    updates = float(np.median([_updates_to_solve(run, loops) for run in outcome.runs.values()]))
    if not math.isfinite(updates):
        return Cell(None), Cell(None)
    flops = updates * config.train.batch_size * config.train.seq_len * training_flops(config)
    return Cell(updates, form="{:.0f}"), Cell(flops, form="{:.1e}")


def _updates_to_solve(run: Run, loops: int) -> float:
    """The first validation at which enough answers within reach, of 1 to `loops` hops, are right."""
    seen = ((line["step"], line["valid_accuracy"][1 : loops + 1]) for line in run.lines if "valid_accuracy" in line)
    return next((step for step, right in seen if sum(right) >= SOLVED * len(right)), math.inf)


def _shortcuts(plan: Plan) -> dict[str, list[float]]:
    config = plan.config(plan.study.reference)
    data = open_data(config.data, vocab_size=config.model.vocab_size, seq_len=config.train.seq_len, progress=False)
    assert isinstance(data, DerefDataset)
    return shortcut_scores(data)


def _by_loops(plan: Plan, done: Sequence[Outcome]) -> list[Table]:
    """The hops solved in a row with other numbers of loops than trained; empty if none were tried."""
    asked = sorted({int(loops) for outcome in done for seed in outcome.hops.values() for loops in seed})
    several = [outcome for outcome in done if any(len(seed) > 1 for seed in outcome.hops.values())]
    if not several:
        return []
    rows: list[list[str | Cell]] = []
    for outcome in several:
        cells = [_reach(shares(plan, outcome, loops)) for loops in asked]
        rows.append([outcome.variant, *cells])
    header = ["hops solved, with other loops", *map(str, asked)]
    note = (
        f"Hops up to which every number of hops has {SOLVED:.0%} right answers, the mean over seeds, when a transition "
        "that is shared by its loops runs another number of them than it was trained with; -1 where not even a value "
        "that stands in the statement itself is read."
    )
    return [Table("test_loops", "Loops at test time", header, rows, [note], error=HALF_WIDTH, labels=1)]


def _reach(seen: np.ndarray | None) -> Cell:
    if seen is None:
        return Cell(None)
    reached = np.logical_and.accumulate(seen >= SOLVED, axis=1).sum(1) - 1
    return Cell(float(reached.mean()), form="{:.1f}")


def hop_pictures(plan: Plan, found: Sequence[Outcome]) -> list[Picture]:
    """Right answers by hops and loops, one panel per transition, with the lines R and 2^R - 1."""
    panels: dict[str, dict[int, np.ndarray]] = {}
    for outcome in found:
        seen = shares(plan, outcome)
        if seen is not None:
            panels.setdefault(_family(outcome.variant), {})[loops_of(plan, outcome.variant)] = seen.mean(0)
    if not panels:
        return []
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.8, 1.7 * rows + 0.9), layout="constrained")
    figure.suptitle("Right answers by hops and loops", x=0.01, ha="left", fontsize=11, fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    image = None
    for axes, (name, lines) in zip(grid.flat, panels.items(), strict=False):
        image = axes.imshow(np.stack([lines[r] for r in sorted(lines)]), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for row, loops in enumerate(sorted(lines)):
            for reach, color in ((loops, "white"), (2**loops - 1, "red")):
                # The line is drawn after the last number of hops within reach.
                axes.plot([reach + 0.5] * 2, [row - 0.5, row + 0.5], color=color, linewidth=1.6)
        axes.set_xlim(-0.5, len(next(iter(lines.values()))) - 0.5)
        axes.set_yticks(range(len(lines)), [f"x{r}" for r in sorted(lines)])
        axes.set_title(name, fontsize=8)
        axes.grid(visible=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("hops", fontsize=9)
    assert image is not None
    figure.colorbar(image, ax=grid, shrink=0.8, label="share of right answers")
    caption = "Means over seeds. White: R hops, one after another; red: 2^R - 1, by pointer doubling."
    return [Picture("hops", caption, figure)]


def hop_heats(plan: Plan, done: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The same for the page of a study, whose groups are the variants in `done`, a row each."""
    rows = []
    for group, outcome in enumerate(done):
        seen, loops = shares(plan, outcome), loops_of(plan, outcome.variant)
        if seen is not None:
            values = numbers(seen.mean(0))
            rows.append({"group": group, "values": values, "borders": [loops + 1, 2**loops]})
    if not rows:
        return []
    columns = [str(hops) for hops in range(max(len(row["values"]) for row in rows))]
    caption = (
        "Percent, means over seeds, by the number of hops. Solid line: R loops follow R hops, one after another; "
        "dashed line: 2^R - 1 hops, by pointer doubling."
    )
    return [{"title": "Right answers by hops", "caption": caption, "columns": columns, "rows": rows}]


def _family(variant: str) -> str:
    """A variant's name without its number of loops, as in `vanilla x4`.

    >>> _family("vanilla x4")
    'vanilla'
    """
    head, _, tail = variant.rpartition(" x")
    return head if tail.isdigit() else variant
