"""Trials before a study: every variant gets equally many, and keeps the values of its best one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..recipe import value_text
from .measures import Outcome
from .spec import Plan, Study, Trials, make_plan

FOLDER = "tuning"
"""The trials' folder within a study's; they are a study of their own."""


class Choice(NamedTuple):
    """The outcome of a variant's trials."""

    changes: tuple[str, ...]
    """The values of the best trial, as key=value."""
    loss: float
    """Its mean validation loss over the seeds of the trials."""
    edges: tuple[str, ...]
    """Keys whose best value is the smallest or largest that was tried, so a better one may lie beyond."""


def combinations(trials: Trials) -> list[tuple[str, ...]]:
    """Every combination of values, as changes to a recipe.

    >>> combinations({"optim.lr": (0.1, 0.2), "loop.options.shared": (True,)})
    [('optim.lr=0.1', 'loop.options.shared=true'), ('optim.lr=0.2', 'loop.options.shared=true')]
    """
    return [
        tuple(f"{key}={value_text(value)}" for key, value in zip(trials, values, strict=True))
        for values in itertools.product(*trials.values())
    ]


def trials_of(study: Study, variant: str) -> Trials:
    """What a variant is tuned over."""
    assert study.tune is not None
    own = study.variants[variant].trials
    return study.tune.trials if own is None else own


def plan_trials(path: Path, plan: Plan, *, set: Iterable[str] = ()) -> Plan:
    """The trials as a study, with one variant per trial."""
    study, tune = plan.study, plan.study.tune
    assert tune is not None
    _check_trials(study)
    variants = {
        trial_name(name, changes): variant.model_copy(
            update={"set": (*variant.set, *changes), "trials": None, "against": None}
        )
        for name, variant in study.variants.items()
        for changes in combinations(trials_of(study, name))
    }
    update: dict[str, Any] = {"variants": variants, "tune": None, "seeds": tune.seeds, "phi": None}
    update |= {"title": f"{study.title}: trials", "reference": _reference(study), "matched": False}
    update |= {} if tune.tokens is None else {"tokens": tune.tokens}
    # The trials' changes come last, since they must override the command line too.
    trials = make_plan(path, study.model_copy(update=update), set=(*set, *tune.set))
    _check_documents(plan, trials)
    return trials


def _reference(study: Study) -> str:
    """The reference of the trials: the first trial of the study's reference."""
    return trial_name(study.reference, combinations(trials_of(study, study.reference))[0])


def _check_trials(study: Study) -> None:
    assert study.tune is not None
    shared = sorted({*study.seeds} & {*study.tune.seeds})
    if shared:
        raise ValueError(f"tune.seeds has {shared}, which the study reports; choose values on seeds of their own")
    numbers = {name: len(combinations(trials_of(study, name))) for name in study.variants}
    if len({*numbers.values()}) > 1:
        said = ", ".join(f"{name!r} {number}" for name, number in numbers.items())
        raise ValueError(f"variants have different numbers of trials ({said}); give each as many")


def _check_documents(plan: Plan, trials: Plan) -> None:
    """Check that values are not chosen by the loss on the documents that are reported."""
    ours, theirs = plan.cells[0].config.data, trials.cells[0].config.data
    # A fold means nothing if the held-out documents are separate files.
    same_fold = ours.valid_fold == theirs.valid_fold or ours.valid_source is not None
    if ours.valid_source == theirs.valid_source and same_fold:
        raise ValueError(
            "trials would be judged by the held-out documents that the study reports; give tune.set another "
            f"data.valid_fold than {ours.valid_fold}, or another data.valid_source"
        )


def choose(study: Study, found: Sequence[Outcome]) -> dict[str, Choice]:
    """The best trial of every variant of which all are settled, by its mean loss over the seeds.

    A trial of which a run diverged is not chosen.
    """
    assert study.tune is not None
    trials = {outcome.variant: outcome for outcome in found}
    chosen = {}
    for name in study.variants:
        made = {changes: trials[trial_name(name, changes)] for changes in combinations(trials_of(study, name))}
        settled = all(len(trial.loss) + len(trial.failures) == len(study.tune.seeds) for trial in made.values())
        means = {
            changes: sum(trial.loss.values()) / len(trial.loss)
            for changes, trial in made.items()
            if settled and not trial.failures
        }
        if not settled:
            continue
        if not means:
            raise ValueError(f"all trials of {name!r} diverged; give [tune] lower rates")
        best = min(means, key=lambda changes: means[changes])
        chosen[name] = Choice(best, means[best], _edges(trials_of(study, name), best))
    return chosen


def trial_name(variant: str, changes: Sequence[str]) -> str:
    """A trial as a variant of the study of trials."""
    return f"{variant}, {', '.join(changes)}"


def _edges(trials: Trials, best: tuple[str, ...]) -> tuple[str, ...]:
    """Keys with several numbers for which the best trial has the smallest or the largest."""
    found = []
    for (key, values), text in zip(trials.items(), best, strict=True):
        numbers = sorted(value for value in values if not isinstance(value, bool | str))
        ends = [f"{key}={value_text(value)}" for value in numbers[:1] + numbers[-1:]]
        found += [key] if len(numbers) > 1 and text in ends else []
    return tuple(found)


def tuned(path: Path, plan: Plan, chosen: Mapping[str, Choice], *, set: Iterable[str] = ()) -> Plan:
    """The study with the chosen values, for variants that have some."""
    study = plan.study
    if study.reference not in chosen:
        raise ValueError(f"the trials of {study.reference!r}, the reference, are not finished; train them first")
    variants = {
        name: variant.model_copy(update={"set": (*variant.set, *chosen[name].changes)})
        for name, variant in study.variants.items()
        if name in chosen
    }
    plan = make_plan(path, study.model_copy(update={"variants": variants}), set=set)
    return dataclasses.replace(plan, notes=tuple(_notes(study, chosen)))


def _notes(study: Study, chosen: Mapping[str, Choice]) -> Iterator[str]:
    assert study.tune is not None
    number = len(combinations(trials_of(study, study.reference)))
    values = "; ".join(f"{name}: {', '.join(choice.changes)}" for name, choice in chosen.items())
    seeds = ", ".join(map(str, study.tune.seeds))
    yield f"Tuned by {number} trials each, on other seeds ({seeds}) and other held-out documents: {values}."
    edges = [f"{name} ({', '.join(choice.edges)})" for name, choice in chosen.items() if choice.edges]
    if edges:
        yield f"Best at the edge of what was tried, so that a better value may lie beyond: {'; '.join(edges)}."
