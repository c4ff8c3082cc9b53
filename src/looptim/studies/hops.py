"""Tasks of known difficulty: what runs solve, by difficulty (the hops that are needed) and the loops that are run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..data import GradedDataset, GradedTask, open_data
from ..model.count import training_flops
from ..reporting.page import numbers
from ..reporting.plots import Picture
from ..reporting.tables import Cell, Table
from ..rundir import Run
from .measures import Outcome
from .spec import Plan
from .tables import HALF_WIDTH

SOLVED = 0.9
"""The share of right answers from which on a difficulty counts as solved."""


def hop_tables(plan: Plan, found: Sequence[Outcome]) -> list[Table]:
    """The share of right answers by difficulty, as trained and with other numbers of loops; none for another task."""
    done = [outcome for outcome in found if outcome.hops]
    if not done:
        return []
    task = task_behind(plan)
    return [_by_hops(plan, task, done), *_by_loops(plan, task, done)]


def task_behind(plan: Plan) -> GradedTask:
    """The task that the runs of a study learn."""
    config = plan.config(plan.study.reference)
    data = open_data(config.data, vocab_size=config.model.vocab_size, seq_len=config.train.seq_len, progress=False)
    assert isinstance(data, GradedDataset)
    return data.graded


def loops_of(plan: Plan, variant: str) -> int:
    """The number of loops a variant is trained with; 1 if it is not looped."""
    return next((s.loops for s in plan.config(variant).model.segments if s.loops is not None), 1)


def shares(plan: Plan, outcome: Outcome, loops: int | None = None) -> np.ndarray | None:
    """Right answers by difficulty, a row per seed, at the trained depth or another; None where that was not asked."""
    key = str(loops_of(plan, outcome.variant) if loops is None else loops)
    rows = [seed[key] for seed in outcome.hops.values() if key in seed]
    return np.array(rows) if rows else None


def _by_hops(plan: Plan, task: GradedTask, done: Sequence[Outcome]) -> Table:
    rows: list[list[str | Cell]] = []
    for outcome in done:
        seen = shares(plan, outcome)
        assert seen is not None
        numbers = [Cell(100 * share, form="{:.0f}") for share in seen.mean(0)]
        total = Cell(float(seen.sum(1).mean()), form="{:.1f}")
        rows.append(
            [outcome.variant, total, *numbers, *_time_to_solve(plan, task, outcome), *_bits(plan, task, outcome)]
        )
    for name, scores in task.shortcut_scores().items():
        numbers = [Cell(100 * score, form="{:.0f}") for score in scores]
        row = [f"*{name}*", Cell(sum(scores), form="{:.1f}"), *numbers]
        rows.append([*row, *[Cell(None)] * (len(rows[0]) - len(row))])
    header = [f"right answers by {task.unit} (%)", "sum", *map(str, task.levels), "updates to 90%", "FLOPs to 90%"]
    header += ["bits per parameter"] if len(rows[0]) > len(header) else []
    title = f"Right answers by {task.unit}, at the trained depth"
    return Table("hops", title, header, rows, _by_hops_notes(task), error=HALF_WIDTH, labels=1)


def _by_hops_notes(task: GradedTask) -> list[str]:
    knobs = ", ".join(f"{name} {value}" for name, value in task.knobs.items())
    if not task.serial:
        reached = "of all answers"
    elif task.unit == "hops":
        reached = "of the answers that need at most R hops"
    else:
        reached = f"of the answers of at most R {task.unit}"
    serial = " R loops can follow R hops one after another, or 2^R - 1 by pointer doubling." * (task.unit == "hops")
    return [
        f"Means over seeds, on held-out problems of {task.name} ({knobs}); the sum is of the shares, over all columns. "
        f"The last rows are what shortcuts score.{serial}",
        f"Updates and FLOPs until 90% {reached} are right, the median over seeds, counted at validations; – where half "
        "of the runs do not get there.",
    ]


def _time_to_solve(plan: Plan, task: GradedTask, outcome: Outcome) -> list[Cell]:
    config, loops = plan.config(outcome.variant), loops_of(plan, outcome.variant)
    updates = float(np.median([_updates_to_solve(run, loops, task) for run in outcome.runs.values()]))
    if not math.isfinite(updates):
        return [Cell(None), Cell(None)]
    flops = updates * config.train.batch_size * config.train.seq_len * training_flops(config)
    return [Cell(updates, form="{:.0f}"), Cell(flops, form="{:.1e}")]


def _updates_to_solve(run: Run, loops: int, task: GradedTask) -> float:
    """The first validation at which enough of the answers within reach, of difficulties 1 to `loops`, are right."""
    wanted = [at for at, level in enumerate(task.levels) if not task.serial or 1 <= level <= loops]
    seen = ((line["step"], line["valid_accuracy"]) for line in run.lines if "valid_accuracy" in line)
    return next((step for step, right in seen if wanted and np.mean([right[at] for at in wanted]) >= SOLVED), math.inf)


def _bits(plan: Plan, task: GradedTask, outcome: Outcome) -> list[Cell]:
    """What a model has stored of a task that asks for facts, over its parameters; nothing for another task."""
    stored = [bits for loss in outcome.loss.values() if (bits := task.bits(loss)) is not None]
    if not stored:
        return []
    return [Cell(float(np.mean(stored)) / sum(plan.counts[outcome.variant].parameters.values()), form="{:.3f}")]


def _by_loops(plan: Plan, task: GradedTask, done: Sequence[Outcome]) -> list[Table]:
    """How many difficulties are solved in a row with other numbers of loops than trained; none where none was tried."""
    asked = sorted({int(loops) for outcome in done for seed in outcome.hops.values() for loops in seed})
    several = [outcome for outcome in done if any(len(seed) > 1 for seed in outcome.hops.values())]
    if not several or not task.serial:
        return []
    rows: list[list[str | Cell]] = []
    for outcome in several:
        cells = [_reach(shares(plan, outcome, loops), task.levels.start) for loops in asked]
        rows.append([outcome.variant, *cells])
    header = [f"{task.unit} solved, with other loops", *map(str, asked)]
    note = (
        f"{task.unit.capitalize()} up to which every number of {task.unit} has {SOLVED:.0%} right answers, the mean "
        "over seeds, when a transition that is shared by its loops runs another number of them than it was trained "
        f"with; {task.levels.start - 1} where not even the least is solved."
    )
    return [Table("test_loops", "Loops at test time", header, rows, [note], error=HALF_WIDTH, labels=1)]


def _reach(seen: np.ndarray | None, lowest: int) -> Cell:
    if seen is None:
        return Cell(None)
    reached = np.logical_and.accumulate(seen >= SOLVED, axis=1).sum(1) + lowest - 1
    return Cell(float(reached.mean()), form="{:.1f}")


def hop_pictures(plan: Plan, found: Sequence[Outcome]) -> list[Picture]:
    """Right answers by difficulty and loops, a panel for each transition, with the lines R and 2^R - 1."""
    panels: dict[str, dict[int, np.ndarray]] = {}
    for outcome in found:
        seen = shares(plan, outcome)
        if seen is not None:
            panels.setdefault(_family(outcome.variant), {})[loops_of(plan, outcome.variant)] = seen.mean(0)
    if not panels:
        return []
    task, columns = task_behind(plan), min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.8, 1.7 * rows + 0.9), layout="constrained")
    figure.suptitle(f"Right answers by {task.unit} and loops", x=0.01, ha="left", fontsize=11, fontweight="bold")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    image = None
    for axes, (name, lines) in zip(grid.flat, panels.items(), strict=False):
        image = axes.imshow(
            np.stack([lines[r] for r in sorted(lines)]),
            vmin=0,
            vmax=1,
            cmap="viridis",
            aspect="auto",
            extent=(task.levels.start - 0.5, task.levels.stop - 0.5, len(lines) - 0.5, -0.5),
        )
        _draw_reach(axes, sorted(lines), task)
        axes.set_xlim(task.levels.start - 0.5, task.levels.stop - 0.5)
        axes.set_yticks(range(len(lines)), [f"x{r}" for r in sorted(lines)])
        axes.set_title(name, fontsize=8)
        axes.grid(visible=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(task.unit, fontsize=9)
    assert image is not None
    figure.colorbar(image, ax=grid, shrink=0.8, label="share of right answers")
    reach = f" White: R {task.unit}, one after another; red: 2^R - 1, by pointer doubling." if task.serial else ""
    return [Picture("hops", f"Means over seeds.{reach}", figure)]


def _draw_reach(axes: Axes, loops: Sequence[int], task: GradedTask) -> None:
    """A line behind the last difficulty that is within reach of each number of loops."""
    for row, each in enumerate(loops):
        for reach, color in ((each, "white"), (2**each - 1, "red")):
            if task.serial:
                axes.plot([reach + 0.5] * 2, [row - 0.5, row + 0.5], color=color, linewidth=1.6)


def hop_heats(plan: Plan, done: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The same for the page of a study, whose groups are the variants in `done`, a row each."""
    measured = [
        (group, outcome, seen) for group, outcome in enumerate(done) if (seen := shares(plan, outcome)) is not None
    ]
    if not measured:
        return []
    task, rows = task_behind(plan), []
    for group, outcome, seen in measured:
        loops = loops_of(plan, outcome.variant)
        # A border stands before the column of so many, counted from the first one.
        borders = [place - task.levels.start for place in (loops + 1, 2**loops)] if task.serial else []
        rows.append({"group": group, "values": numbers(seen.mean(0)), "borders": borders})
    columns = [str(level) for level in task.levels]
    caption = f"Percent, means over seeds, by the number of {task.unit}." + task.serial * (
        f" Solid line: R loops follow R {task.unit}, one after another; dashed line: 2^R - 1, by pointer doubling."
    )
    return [{"title": f"Right answers by {task.unit}", "caption": caption, "columns": columns, "rows": rows}]


def _family(variant: str) -> str:
    """A variant's name without its number of loops, as in `vanilla x4`.

    >>> _family("vanilla x4")
    'vanilla'
    """
    head, _, tail = variant.rpartition(" x")
    return head if tail.isdigit() else variant
