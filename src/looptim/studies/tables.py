"""The tables of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data import GRADED
from ..data.sources import scheme_of
from ..reporting.tables import Cell, Table
from ..rundir import bits_per_byte
from .grid import PROBLEMS, task_of
from .measures import SPIKE, Comparison, Outcome, data_of, stability
from .spec import Plan
from .statistics import MOST_SEEDS, Estimate, check, estimate

HALF_WIDTH = "half_width_95"
"""The meaning of ± in a study."""


def tables(plan: Plan, found: Sequence[Outcome], compared: Sequence[Comparison]) -> list[Table]:
    """What was measured, and how steady training was."""
    return [_results(plan, found, compared), _stability(plan, found)]


def _results(plan: Plan, found: Sequence[Outcome], compared: Sequence[Comparison]) -> Table:
    study = plan.study
    columns: dict[str, Sequence[str | Cell]] = {
        "variant": [_label(plan, outcome.variant) for outcome in found],
        "layout": [plan.config(outcome.variant).model.layout for outcome in found],
        **_own(plan, found),
        "parameters": [f"{sum(plan.counts[outcome.variant].parameters.values()) / 1e6:.2f} M" for outcome in found],
        f"FLOPs / {study.reference}": [f"{plan.flops(outcome.variant):.3f}×" for outcome in found],
        **_lengths(plan, found),
        "seeds": [f"{len(outcome.runs)} of {len(study.seeds)}" for outcome in found],
    }
    for each in compared:
        columns |= _columns(plan, found, each)
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table(plan.name, study.title, list(columns), rows, _notes(plan, found, compared), error=HALF_WIDTH, labels=1)


def _own(plan: Plan, found: Sequence[Outcome]) -> dict[str, Sequence[str | Cell]]:
    """A column for what variants change in the base, if any does."""
    changes = [", ".join(plan.study.variants[outcome.variant].set) for outcome in found]
    return {"set": [text or "–" for text in changes]} if any(changes) else {}


def _lengths(plan: Plan, found: Sequence[Outcome]) -> dict[str, Sequence[str | Cell]]:
    """A column for the tokens of a run, where variants are trained on different numbers of them."""
    tokens = [plan.tokens_of(outcome.variant) for outcome in found]
    return {"tokens": [f"{number / 1e6:.2f} M" for number in tokens]} if len({*tokens}) > 1 else {}


def _label(plan: Plan, variant: str) -> str:
    return variant + (" (noncausal)" if plan.study.variants[variant].noncausal else "")


def _columns(plan: Plan, found: Sequence[Outcome], compared: Comparison) -> dict[str, Sequence[str | Cell]]:
    """By one measure: the means, their differences, and, of the validation loss, what else is to be known of them."""
    measure, reference, names = compared.measure, plan.study.reference, [outcome.variant for outcome in found]
    factor, signed = 100 if measure.percent else 1, measure.form.replace(":", ":+")
    means = [estimate(list(measure.of(outcome).values())) for outcome in found]
    cells = [_cell(mean, measure.form, factor) for mean in means]
    first = measure.key == "loss"
    heading = f"{measure.heading}, {task_of(plan.config(reference))} (%)" if measure.percent else measure.heading
    of = "" if first else f"{measure.heading.partition(',')[0]} "
    columns: dict[str, Sequence[str | Cell]] = {heading: _marked(cells) if first else cells}
    scale = bits_per_byte(data_of(found))
    if first and scale is not None:
        columns["bits per byte"] = [Cell(mean and mean.mean * scale, form="{:.4f}") for mean in means]
    columns[f"{of}minus {reference}"] = [_cell(compared.to_reference.get(name), signed, factor) for name in names]
    if first and compared.model.df:
        columns["seeds to see it"] = [_seeds(compared, name) for name in names]
    if any(variant.against for variant in plan.study.variants.values()):
        columns[f"{of}minus its twin"] = [_cell(compared.to_twin.get(name), signed, factor) for name in names]
    return columns


def _seeds(compared: Comparison, name: str) -> Cell | str:
    value = compared.to_reference.get(name)
    if value is None:
        return Cell(None)
    needed = compared.seeds_needed(value.mean)
    return f"> {MOST_SEEDS}" if needed is None else Cell(needed, form="{:.0f}")


def _stability(plan: Plan, found: Sequence[Outcome]) -> Table:
    forms = {"spikes": "{:.1f}", "state growth, start": "{:.3f}", "state growth, end": "{:.3f}"}
    rows: list[list[str | Cell]] = []
    for outcome in found:
        values = stability(outcome)
        cells = [_cell(value, forms.get(name, "{:.2f}")) for name, value in values.items()]
        rows.append([_label(plan, outcome.variant), Cell(float(len(outcome.failures)), form="{:.0f}"), *cells])
    header = ["variant", "runs that failed", *stability(found[0])]
    notes = [
        "State growth is the RMS of the state after the last loop over that before the first, on validation text, "
        "before training and after it.",
        f"A spike is a training loss {SPIKE} nats above the mean of the ten logged before it. The largest gradient "
        "norm is that after the first tenth of training, before clipping.",
    ]
    return Table(f"{plan.name}-stability", "Stability", header, rows, notes, error=HALF_WIDTH)


def _cell(value: Estimate | None, form: str, factor: int = 1) -> Cell:
    if value is None:
        return Cell(None)
    return Cell(value.mean * factor, None if value.half is None else value.half * factor, form=form)


def _marked(cells: Sequence[Cell]) -> list[Cell]:
    """The lowest loss in bold, the second lowest underlined."""
    order = sorted((cell.value, index) for index, cell in enumerate(cells) if cell.value is not None)
    marked = list(cells)
    for (_, index), mark in zip(order, ("bold", "underline"), strict=False):
        marked[index] = cells[index]._replace(mark=mark)
    return marked


def _notes(plan: Plan, found: Sequence[Outcome], compared: Sequence[Comparison]) -> list[str]:
    study, config = plan.study, plan.config(plan.study.reference)
    # A file is shown by its name alone, since tables are shared and folders are private.
    text = config.data.source if scheme_of(config.data.source) else Path(config.data.source).name
    notes = [
        f"{plan.tokens:,} training tokens a run{_matched(plan)}, of {text}; losses in nats per token."
        f"{held_out(data_of(found))}",
        "The least loss is in bold and the second underlined, whatever their intervals.",
    ]
    if any(variant.noncausal for variant in study.variants.values()):
        notes.append(
            "**Noncausal** variants were allowed to let a token see later tokens or other sequences: their losses are "
            "not those of a language model."
        )
    twins = [f"{name}: {variant.against}" for name, variant in study.variants.items() if variant.against]
    if twins:
        notes.append(f"Twins: {'; '.join(twins)}.")
    notes += _statistics(plan, found, compared)
    if any(each.measure.key == "training_loss" for each in compared):
        notes.append(
            "The training loss is the mean over the last fifth of the updates, each before its update; no text was "
            "seen twice, so that it is a loss on unseen text too."
        )
    elif task_of(config) is None and any(outcome.runs for outcome in found):
        notes.append("No training loss is compared: text was seen more than once, or the number of loops was drawn.")
    notes += plan.notes
    if task_of(config):
        how = "" if task_of(config) in GRADED else " by greedy generation"
        notes.append(f"Exact match{how} on {PROBLEMS} held-out problems, the same for every run.")
    if not study.matched:
        notes.append("The variants were not required to match in FLOPs.")
    missing = sum(len(study.seeds) - len(outcome.runs) for outcome in found)
    if missing:
        notes.append(f"{missing} of {len(plan.cells)} runs are not finished.")
    for outcome in found:
        for seed, reason in outcome.failures.items():
            notes.append(f"{outcome.variant}, seed {seed}, did not finish: {reason}.")
    return notes


def _matched(plan: Plan) -> str:
    """What is said of a budget that is the same in FLOPs, not in tokens."""
    if plan.study.match == "tokens":
        return ""
    return (
        f" of {plan.study.reference}, and for the others as many as take the same training FLOPs, the schedule of the "
        "rate as much shorter or longer"
    )


def held_out(data: Mapping[str, Any]) -> str:
    """The size and hash of the held-out text or, if a run did not record it, the hash of all the text."""
    if "valid_documents" not in data:
        return f" Held-out problems are drawn too, hash of the first {data['content'][:12]}." if data else ""
    documents, tokens = data["valid_documents"], data["valid_tokens"]
    hashed = data.get("valid_hash")
    of = f"hash {hashed[:12]}" if hashed else f"hash of all the text {data['content'][:12]}"
    size = f", {data['valid_bytes']:,} bytes" if "valid_bytes" in data else ""
    return f" Held out: {documents:,} document{'s' * (documents != 1)}, {tokens:,} tokens{size}, {of}."


def _statistics(plan: Plan, found: Sequence[Outcome], compared: Sequence[Comparison]) -> list[str]:
    """What ± means, how well its assumptions hold, and how many seeds would show more."""
    done = max(len(outcome.runs) for outcome in found)
    if done == 1:
        return ["One seed only: there are no intervals, and differences may be noise."]
    free = [each for each in compared if each.model.df]
    if not free:
        return []
    other = {"both": "", "weights": f", the order of the data is that of seed {plan.held}"}
    other["data"] = f", the initial weights are those of seed {plan.held}"
    notes = [
        "Differences are of the model variant + seed + residual, by least squares: variants of one seed have the same "
        f"initial weights in all shared parts and the same batches{other[plan.study.vary]}.",
        "± of a difference is the half-width of a 95% interval, with the residual of all variants, that holds for its "
        "whole column at once (after Dunnett); ± of a mean is Student's, over its own seeds.",
    ]
    for each in free:
        notes.append(f"{each.measure.heading.capitalize()}: {_model(each)}.")
    return notes


def _model(compared: Comparison) -> str:
    measure, model, checked = compared.measure, compared.model, check(compared.model)
    unit, size = ("points", 100 * measure.size) if measure.percent else ("nats", measure.size)
    sd = f"{100 * model.sd:.1f} points" if measure.percent else f"{model.sd:.4f}"
    needed = compared.seeds_needed(measure.size) or f"more than {MOST_SEEDS}"
    text = f"residual sd {sd} ({model.df} degrees of freedom); to see {size:g} {unit} takes {needed} seeds (power 0.8)"
    if checked is None:
        return f"{text}; too few runs to test the model"
    doubt = ", **so the intervals are doubtful**" if checked.is_doubtful else ""
    return (
        f"{text}; equal spread p = {checked.spread:.2g} (a variant of three times the spread is noticed in "
        f"{checked.noticed:.0%} of cases), no interaction p = {checked.additivity:.2g}{doubt}"
    )
