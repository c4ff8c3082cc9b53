"""The tables of a study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..reporting.tables import Cell, Table
from .grid import PROBLEMS, task_of
from .measures import SPIKE, Estimate, Outcome, estimate, paired, stability
from .spec import Plan

HALF_WIDTH = "half_width_95"
"""What stands behind ± in a study: of an interval over seeds."""


def tables(plan: Plan, found: Sequence[Outcome]) -> list[Table]:
    """What was measured, and how steady training was."""
    return [_results(plan, found), _stability(plan, found)]


def _results(plan: Plan, found: Sequence[Outcome]) -> Table:
    study = plan.study
    by_name = {outcome.variant: outcome for outcome in found}
    twins = any(variant.against for variant in study.variants.values())
    task = task_of(plan.config(study.reference))
    header = ["variant", "layout", "parameters", f"FLOPs / {study.reference}", "seeds", "validation loss"]
    header += [f"minus {study.reference}", *(["minus its twin"] if twins else [])]
    if task:
        header += [f"exact match, {task} (%)", f"exact match minus {study.reference}"]
        header += ["exact match minus its twin"] if twins else []
    rows: list[list[str | Cell]] = []
    for outcome in found:
        count, against = plan.counts[outcome.variant], study.variants[outcome.variant].against
        others = [None if outcome.variant == study.reference else by_name[study.reference]]
        others += [by_name[against] if against else None] if twins else []
        row: list[str | Cell] = [
            outcome.variant,
            plan.config(outcome.variant).model.layout,
            f"{sum(count.parameters.values()) / 1e6:.2f} M",
            f"{plan.flops(outcome.variant):.3f}×",
            f"{len(outcome.runs)} of {len(study.seeds)}",
            _cell(estimate(list(outcome.loss.values())), "{:.4f}"),
            *(_cell(other and paired(outcome.loss, other.loss), "{:+.4f}") for other in others),
        ]
        if task:
            points = _points(outcome)
            row.append(_cell(estimate(list(points.values())), "{:.1f}"))
            row += [_cell(other and paired(points, _points(other)), "{:+.1f}") for other in others]
        rows.append(row)
    rows = _marked(rows, header.index("validation loss"))
    return Table(plan.name, study.title, header, rows, _notes(plan, found), error=HALF_WIDTH, labels=1)


def _points(outcome: Outcome) -> dict[int, float]:
    return {seed: 100 * share for seed, share in outcome.exact_match.items()}


def _stability(plan: Plan, found: Sequence[Outcome]) -> Table:
    forms = {"spikes": "{:.1f}", "state growth, start": "{:.3f}", "state growth, end": "{:.3f}"}
    rows: list[list[str | Cell]] = []
    for outcome in found:
        values = stability(outcome)
        cells = [_cell(value, forms.get(name, "{:.2f}")) for name, value in values.items()]
        rows.append([outcome.variant, Cell(float(len(outcome.failures)), form="{:.0f}"), *cells])
    header = ["variant", "runs that failed", *stability(found[0])]
    notes = [
        "State growth is the RMS of the state after the last loop over that before the first, on validation text, "
        "before training and after it.",
        f"A spike is a training loss {SPIKE} nats above the mean of the ten logged before it. The largest gradient "
        "norm is that after the first tenth of training, before clipping.",
    ]
    return Table(f"{plan.name}-stability", "Stability", header, rows, notes, error=HALF_WIDTH)


def _cell(value: Estimate | None, form: str) -> Cell:
    return Cell(None) if value is None else Cell(value.mean, value.half, form=form)


def _marked(rows: list[list[str | Cell]], column: int) -> list[list[str | Cell]]:
    """The least loss in bold, the second underlined."""
    order = sorted(
        (cell.value, index)
        for index, row in enumerate(rows)
        if isinstance(cell := row[column], Cell) and cell.value is not None
    )
    for (_, index), mark in zip(order, ("bold", "underline"), strict=False):
        cell = rows[index][column]
        assert isinstance(cell, Cell)
        rows[index][column] = cell._replace(mark=mark)
    return rows


def _notes(plan: Plan, found: Sequence[Outcome]) -> list[str]:
    study, config = plan.study, plan.config(plan.study.reference)
    done = max(len(outcome.runs) for outcome in found)
    # Of a file its name: a table is shown to others, whose folders are not ours.
    named = config.data.source.startswith(("hf:", "synthetic:"))
    text = config.data.source if named else Path(config.data.source).name
    notes = [
        f"{plan.tokens:,} training tokens a run, of {text}; losses in nats per token.",
        "The least loss is in bold and the second underlined, whatever their intervals.",
        "Differences are paired by seed, over the seeds that both have: the same initial weights in all shared parts "
        "and the same batches.",
    ]
    twins = [f"{name}: {variant.against}" for name, variant in study.variants.items() if variant.against]
    if twins:
        notes.append(f"Twins: {'; '.join(twins)}.")
    if done > 1:
        notes.append("± is the half-width of a 95% interval over the seeds (Student's t).")
    elif done == 1:
        notes.append("One seed only: there are no intervals, and differences may be noise.")
    if task_of(config):
        notes.append(f"Exact match by greedy generation on {PROBLEMS} held-out problems, the same for every run.")
    if not study.matched:
        notes.append("The variants were not required to match in FLOPs.")
    missing = sum(len(study.seeds) - len(outcome.runs) for outcome in found)
    if missing:
        notes.append(f"{missing} of {len(plan.cells)} runs are not finished.")
    for outcome in found:
        for seed, reason in outcome.failures.items():
            notes.append(f"{outcome.variant}, seed {seed}, did not finish: {reason}.")
    return notes
