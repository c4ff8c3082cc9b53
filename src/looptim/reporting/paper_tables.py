"""The paper's results tables from what `evaluate` wrote, in Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..data import TASKS
from ..evaluation.averages import averages, scores
from ..evaluation.suites import FLEXIBLE, ROWS
from ..evaluation.tasks import COUNT
from ..rundir import RunDir
from .tables import Cell, Table

PPL, LL, EM = ([row for row in ROWS if row.group == group] for group in ("PPL", "LL", "EM"))


@dataclass(frozen=True)
class Column:
    """A model in the tables: a run at one number of loops."""

    name: str
    model: dict[str, Any]
    """What the results say of it: layout, preset, options, loops, parameters, FLOPs."""
    scores: dict[str, tuple[float, float | None]]
    """Value and standard error by row, averages included."""
    notes: list[str] = field(default_factory=list)

    @property
    def looped(self) -> bool:
        """Whether it is a looped model, and not a baseline."""
        return self.model["loops"] is not None

    def cell(self, name: str) -> Cell:
        value, error = self.scores.get(name, (None, None))
        return Cell(value, error)


class Scale(NamedTuple):
    """A baseline, where there is one, and the models that are compared with it."""

    baseline: Column | None
    columns: list[Column]

    def ratio(self, column: Column, quantity: str) -> Cell:
        """Parameters or FLOPs relative to the baseline."""
        if self.baseline is None:
            return Cell(None)
        return Cell(column.model[quantity] / self.baseline.model[quantity], form="{:.2f}×")


def read_columns(folder: str | Path, name: str | None = None) -> list[Column]:
    """The results of a run, one column for each number of loops it was evaluated at.

    A task that was only evaluated in part stands in the table with a note; a whole result goes first.
    """
    folder = Path(folder)
    found: dict[int, list[dict[str, Any]]] = {}
    newest: dict[str, Any] = {}
    # The newest evaluation comes last: the column is about the weights it saw.
    for loops, newest in RunDir(folder).evaluations():
        found.setdefault(loops or 0, []).append(newest)
    name = name or folder.resolve().name
    weights = newest["settings"]["model"]["weights"] if newest else None
    columns = []
    for loops, records in sorted(found.items()):
        columns.append(_column(f"{name}, {loops} loops" if loops else name, records))
        if columns[-1].model["weights"] != weights:
            columns[-1].notes.append(f"{columns[-1].name}: of other weights than the newest result")
    return columns


def _column(name: str, found: Sequence[dict[str, Any]]) -> Column:
    model = found[-1]["settings"]["model"]
    name += " (noncausal)" if model.get("noncausal") else ""
    records: dict[str, dict[str, Any]] = {}
    for record in found:
        task = record["task"]
        same = record["settings"]["model"]["weights"] == model["weights"]
        if same and (task not in records or _size(record) > _size(records[task])):
            records[task] = record
    table = scores({task: record["results"] for task, record in records.items()})
    means = averages({row: value for row, (value, _) in table.items()})
    table |= {mean: (value, None) for mean, value in means.items() if value is not None}
    for task, record in records.items():
        if task not in {row.task for row in ROWS}:
            table |= _other_scores(task, record["results"])
    # A run may have been trained further between two evaluations, whose results are then of different weights.
    earlier = dict.fromkeys(record["task"] for record in found if record["task"] not in records)
    notes = [f"{name}: left out, of other weights than the newest result: {', '.join(earlier)}"] if earlier else []
    limited: dict[int, list[str]] = {}
    for task, record in records.items():
        limit = record["settings"]["limit"]
        # A task of ours has no end, so that a limit of the usual number of problems is none.
        if limit is not None and (task not in TASKS or limit < COUNT):
            limited.setdefault(limit, []).append(task)
    notes += [f"{name}: only the first {limit} problems of {', '.join(tasks)}" for limit, tasks in limited.items()]
    return Column(name, model, table, notes + [f"{name}: {note}" for r in records.values() for note in r["notes"]])


def _size(record: dict[str, Any]) -> int:
    """How many problems it is of."""
    return sum(record["samples"].values())


def _other_scores(task: str, results: dict[str, float]) -> dict[str, tuple[float, float | None]]:
    """Every metric of a task that is no row of the paper's, shares as percentages."""
    table = {}
    for metric, value in results.items():
        if "_stderr," not in metric:
            error = results.get(metric.replace(",", "_stderr,"))
            scale = 100.0 if metric.startswith(("acc", "exact_match", "pass@")) else 1.0
            label = f"{task} {metric.removesuffix(',none')}"
            table[label] = (scale * value, None if error is None else scale * error)
    return table


def tables(columns: Sequence[Column]) -> list[Table]:
    """The main table, and those of alignment, loop counts and ablations where the models make one."""
    if not columns:
        return []
    scales = split_scales(columns)
    made = [main_table(scales), alignment_table(scales), loop_table(scales), ablation_table(columns), other(columns)]
    found = [table for table in made if table is not None]
    for table in found[:1]:
        table.notes.extend(note for column in columns for note in column.notes)
    return found


def split_scales(columns: Sequence[Column]) -> list[Scale]:
    """Each baseline starts a scale, and the looped models after it belong to it."""
    first = next((index for index, column in enumerate(columns) if not column.looped), None)
    if first is None:
        return [Scale(None, list(columns))]
    # The first baseline is taken to the front: where there is one only, it may be given at any place.
    ordered = [columns[first], *columns[:first], *columns[first + 1 :]]
    scales: list[Scale] = []
    for column in ordered:
        if column.looped:
            scales[-1].columns.append(column)
        else:
            scales.append(Scale(column, [column]))
    return scales


def mark(cells: Sequence[Cell], columns: Sequence[Column], *, lower: bool) -> list[Cell]:
    """The best of the looped models in bold and the second underlined, as printed; alone, none is."""
    values = [
        # A model that diverged has no number to compare.
        round(cell.value, 2) if column.looped and cell.value is not None and math.isfinite(cell.value) else None
        for cell, column in zip(cells, columns, strict=True)
    ]
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return list(cells)
    ranks = sorted(set(known), reverse=not lower)
    marks: dict[float | None, Literal["bold", "underline"]] = dict(zip(ranks, ("bold", "underline"), strict=False))
    return [cell._replace(mark=marks.get(value)) for cell, value in zip(cells, values, strict=True)]


def main_table(scales: Sequence[Scale]) -> Table | None:
    """Rows are benchmarks, columns are models (Table 3)."""
    columns = [column for scale in scales for column in scale.columns]
    if not any(row.name in column.scores for row in ROWS for column in columns):
        return None

    def across(name: str, *, lower: bool = False) -> list[Cell]:
        return [
            cell
            for scale in scales
            for cell in mark([column.cell(name) for column in scale.columns], scale.columns, lower=lower)
        ]

    ratios = {
        label: [scale.ratio(column, key) for scale in scales for column in scale.columns]
        for label, key in (("Parameters", "parameters"), ("FLOPs", "flops_per_token"))
    }
    rows: list[list[str | Cell]] = [["", label, *cells] for label, cells in ratios.items()]
    rows += [["PPL ↓", row.label, *across(row.name, lower=True)] for row in PPL]
    rows += [[f"{row.category} LL ↑", row.label, *across(row.name)] for row in LL]
    rows.append(["", "LL Avg.", *across("LL Avg.")])
    rows += [[f"{row.category} EM ↑", row.label, *across(row.name)] for row in EM]
    rows += [["", mean, *across(mean)] for mean in ("EM Avg.", "Overall")]
    if any(row.name in column.scores for row in FLEXIBLE for column in columns):
        rows += [["flexible", row.label, *across(row.name)] for row in FLEXIBLE]
        rows += [["flexible", mean, *across(f"{mean} (flexible)")] for mean in ("EM Avg.", "Overall")]
    header = ["Category", "Dataset", *(column.name for column in columns)]
    notes = [
        "Parameters without the vocabulary and FLOPs without the head, relative to the baseline. Bold and underlined: "
        "best and second of the looped models of a scale. ±: standard error. GSM8K by strict match; `flexible` are "
        "the same rows and averages by flexible extraction."
    ]
    return Table("main", "Main results", header, rows, notes)


def _models_table(
    name: str,
    title: str,
    scales: Sequence[Scale],
    names: dict[str, str],
    last: tuple[str, Callable[[Scale, Column], Cell]],
) -> Table:
    """Rows are models, columns are ratios, benchmarks by label, and one thing more."""
    rows: list[list[str | Cell]] = []
    for scale in scales:
        down = {
            label: mark([column.cell(score) for column in scale.columns], scale.columns, lower=score.endswith("_ppl"))
            for label, score in names.items()
        }
        for index, column in enumerate(scale.columns):
            ratios = [scale.ratio(column, key) for key in ("parameters", "flops_per_token")]
            rows.append([column.name, *ratios, *(cells[index] for cells in down.values()), last[1](scale, column)])
    return Table(name, title, ["Model", "Param.", "FLOPs", *names, last[0]], rows, [])


PERPLEXITIES = {"Wiki. PPL ↓": "wikitext_ppl", "Lamb. PPL ↓": "lambada_ppl"}


def alignment_table(scales: Sequence[Scale]) -> Table | None:
    """A transition beside its aligned twin (Table 2)."""

    def gain(scale: Scale, column: Column) -> Cell:
        preset = column.model["preset"]
        twins = [c for c in scale.columns if f"{c.model['preset']}_aligned" == preset]
        twin = next((c for c in twins if c.model["loops"] == column.model["loops"]), None)
        ours, theirs = (c.scores.get("LL Avg.", (None,))[0] if c else None for c in (column, twin))
        return Cell(None if ours is None or theirs is None else ours - theirs, form="{:+.2f}")

    if all(gain(scale, column).value is None for scale in scales for column in scale.columns):
        return None
    names = PERPLEXITIES | {row.label: row.name for row in LL} | {"Avg.": "LL Avg."}
    return _models_table("alignment", "Effect of input-map alignment", scales, names, ("ΔAvg.", gain))


def loop_table(scales: Sequence[Scale]) -> Table | None:
    """The same transition at several numbers of loops (Table 4)."""
    loops: dict[str, set[int]] = {}
    for column in (column for scale in scales for column in scale.columns if column.looped):
        loops.setdefault(column.model["preset"], set()).add(column.model["loops"])
    if all(len(numbers) < 2 for numbers in loops.values()):
        return None

    def gain(scale: Scale, column: Column) -> Cell:
        ours, base = (c.scores.get("EM Avg.", (None,))[0] if c else None for c in (column, scale.baseline))
        same = column is scale.baseline
        return Cell(None if ours is None or base is None or same else ours - base, form="{:+.2f}")

    names = PERPLEXITIES | {"Com. Avg.": "LL Avg."} | {row.label: row.name for row in EM} | {"EM Avg.": "EM Avg."}
    return _models_table("loops", "Downstream evaluation by loop count", scales, names, ("Δ", gain))


STEPS = {"causal": "Causal", "sigmoid": "Non-Causal", "unit": "×"}


def ablation_table(columns: Sequence[Column]) -> Table | None:
    """OperLoop without its objective or its step size (Tables 5 and 6)."""
    ours = [column for column in columns if column.model["preset"] == "operloop"]
    options = [(c.model["options"].get("objective", "delta"), c.model["options"].get("step", "causal")) for c in ours]
    if len(set(options)) < 2:
        return None
    names = PERPLEXITIES | {"LL Avg. ↑": "LL Avg.", "EM Avg. ↑": "EM Avg."}
    cells = [mark([c.cell(n) for c in ours], ours, lower=n.endswith("_ppl")) for n in names.values()]
    rows: list[list[str | Cell]] = [
        [
            column.name,
            "✓" if objective == "delta" else "×",
            STEPS.get(step) or str(step),
            *(row[index] for row in cells),
        ]
        for index, (column, (objective, step)) in enumerate(zip(ours, options, strict=True))
    ]
    return Table("ablations", "Ablations of OperLoop", ["Variant", "Delta Obj.", "Step size", *names], rows, [])


LOWER = ("perplexity", "bits_per_byte", "brier_score", " ter")
"""Parts of the names of lm-eval's metrics that are better if lower."""


def other(columns: Sequence[Column]) -> Table | None:
    """What was evaluated besides the paper's benchmarks, our reasoning tasks among it."""
    known = {row.name for row in (*ROWS, *FLEXIBLE)} | set(averages({}))
    names = dict.fromkeys(name for column in columns for name in column.scores if name not in known)
    if not names:
        return None
    rows: list[list[str | Cell]] = [
        [name, *mark([column.cell(name) for column in columns], columns, lower=any(part in name for part in LOWER))]
        for name in names
    ]
    return Table("other", "Other tasks", ["Task", *(column.name for column in columns)], rows, [])


def tables_of(runs: Sequence[str | Path]) -> list[Table]:
    """The tables of the runs that were evaluated; none where none was."""
    folders = [Path(run) for run in runs]
    names = [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    return tables([c for folder, name in zip(folders, names, strict=True) for c in read_columns(folder, name)])
