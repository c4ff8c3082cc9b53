"""What the runs of a study say: means over seeds, paired differences, and how steady training was."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ..data import open_data
from ..rundir import Run, RunDir, difference
from .grid import answers_of, divergence, is_finished, is_settled, task_of
from .spec import Cell, Plan

QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Of Student's t at 0.975, for 1 to 30 degrees of freedom; more have the last, which makes them a little wide."""

SPIKE = 0.3
"""Nats by which a logged loss must exceed the mean of the ten before it to be called a spike."""


class Estimate(NamedTuple):
    """A mean over seeds and the half-width of its 95% interval, None where one seed tells nothing of it."""

    mean: float
    half: float | None
    values: tuple[float, ...]


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and Student's interval, `t s / sqrt(n)`.

    >>> round(estimate([1.0, 2.0, 3.0]).half, 3)
    2.484
    """
    if not values:
        return None
    data = np.array(values, float)
    if len(data) == 1:
        return Estimate(float(data[0]), None, tuple(values))
    quantile = QUANTILES[min(len(data) - 2, len(QUANTILES) - 1)]
    return Estimate(float(data.mean()), float(quantile * data.std(ddof=1) / math.sqrt(len(data))), tuple(values))


@final
@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one variant: its runs by seed, and what they measured."""

    variant: str
    runs: dict[int, Run]
    """Finished ones."""
    failures: dict[int, str]
    loss: dict[int, float]
    """The last validation loss, in nats per token."""
    exact_match: dict[int, float]
    """Shares, on the task the runs learn; empty on text."""


def check_runs(plan: Plan, runs: Path, *, progress: bool) -> None:
    """Open the data, if a run is missing, and look at the runs that are there, before hours go into others."""
    for cell in plan.cells:
        _check_config(cell, RunDir(runs / cell.name))
    if all(is_settled(cell, runs) for cell in plan.cells):
        return
    config = plan.cells[0].config
    if task_of(config) and importlib.util.find_spec("transformers") is None:
        raise ValueError("a study of a task asks its runs through transformers; pip install 'looptim[hf]'")
    data = open_data(
        config.data, vocab_size=config.model.vocab_size, seq_len=config.train.seq_len, progress=progress
    ).fingerprint
    outcomes(plan, runs, seen={_text(data): "the runs that are missing"})


def _check_config(cell: Cell, run: RunDir) -> None:
    """That a run is of the config whose name it has: a default of looptim may have changed since."""
    changes = difference(run.config(), cell.config) if run.config_file.is_file() else []
    if changes:
        raise ValueError(
            f"the run {run.path} has another config ({'; '.join(changes)}); give another --out (and --runs)"
        )


def outcomes(plan: Plan, runs: Path, *, seen: Mapping[str, str] | None = None) -> list[Outcome]:
    """Every variant's settled runs. That they are whole and all saw the same data, and that in `seen`, is checked."""
    found = {name: Outcome(name, {}, {}, {}, {}) for name in plan.study.variants}
    seen = dict(seen or {})
    for cell in plan.cells:
        outcome = found[cell.variant]
        diverged = divergence(cell, runs)
        if diverged is not None:
            outcome.failures[cell.seed] = diverged
            continue
        if not is_finished(cell, runs):
            continue
        try:
            run = _read(cell, runs)
            data = _text(run.environment["data"])
            share = _exact_match(cell, runs)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"the run {runs / cell.name} is damaged ({error}); delete it, and the same command trains it again"
            ) from None
        seen.setdefault(data, f"the run {cell.name}")
        loss = float(run.column("valid_loss")[1][-1])
        if not math.isfinite(loss):
            outcome.failures[cell.seed] = "its last validation loss is not finite"
            continue
        outcome.runs[cell.seed] = run
        outcome.loss[cell.seed] = loss
        if share is not None:
            outcome.exact_match[cell.seed] = share
    if len(seen) > 1:
        raise ValueError(
            f"{' and '.join(list(seen.values())[:2])} in {runs} see different data, so they cannot be compared; "
            "give another --out (and --runs)"
        )
    return list(found.values())


def _text(data: Mapping[str, Any]) -> str:
    """What text it is; where it lies is not a part of that."""
    return json.dumps({key: value for key, value in data.items() if key != "source"}, sort_keys=True)


def _read(cell: Cell, runs: Path) -> Run:
    """A finished run with all of its metrics, which, unlike its checkpoint, a power cut may have shortened."""
    run, settings = RunDir(runs / cell.name).read(f"{cell.variant}, seed {cell.seed}"), cell.config.train
    logged = [line["step"] for line in run.lines if "loss" in line]
    validated = [line["step"] for line in run.lines if "valid_loss" in line]
    if logged != [*range(settings.log_every, settings.steps, settings.log_every), settings.steps]:
        raise ValueError("its metrics lack updates")
    if validated[-1:] != [settings.steps]:
        raise ValueError("its metrics lack the last validation")
    return run


def _exact_match(cell: Cell, runs: Path) -> float | None:
    answers = answers_of(cell, runs)
    return None if answers is None else json.loads(answers.read_text())["results"]["exact_match,none"]


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """The difference over the seeds both have: same initial weights in the shared parts, same batches."""
    return estimate([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def spikes(run: Run) -> int:
    """Losses that stand out of the ten logged before them."""
    loss = run.column("loss")[1]
    if len(loss) <= 10:
        return 0
    means = np.convolve(loss, np.ones(10) / 10, "valid")[:-1]
    return int((loss[10:] > means + SPIKE).sum())


def growth(run: Run) -> list[NDArray]:
    """The state's RMS over that before the first loop: for each looped segment, a row per validation."""
    _, norms = run.columns("state_norm")
    if not norms.size:
        return []
    ends = np.cumsum([times + 1 for times in run.loops])[:-1]
    return [part / part[:, :1] for part in np.split(norms, ends, axis=1)]


def state_growth(run: Run) -> tuple[float, float] | None:
    """What the state has grown to after the last loop: before training, and after it.

    Of several looped segments, that of the one that grows most.
    """
    last = [part[:, -1] for part in growth(run)]
    return (float(max(g[0] for g in last)), float(max(g[-1] for g in last))) if last else None


def stability(outcome: Outcome) -> dict[str, Estimate | None]:
    """Means over the seeds of what tells how steady training was."""
    runs = list(outcome.runs.values())
    grown = [pair for run in runs if (pair := state_growth(run)) is not None]
    norms = [run.column("grad_norm")[1] for run in runs]
    return {
        "spikes": estimate([spikes(run) for run in runs]),
        "gradient norm, median": estimate([float(np.median(values)) for values in norms]),
        "gradient norm, largest": estimate([float(values[len(values) // 10 :].max()) for values in norms]),
        "state growth, start": estimate([start for start, _ in grown]),
        "state growth, end": estimate([end for _, end in grown]),
    }


def as_json(plan: Plan, found: Sequence[Outcome]) -> dict[str, Any]:
    """Every number of the tables, for programs."""
    by_name = {outcome.variant: outcome for outcome in found}
    reference = by_name[plan.study.reference]
    rows = {}
    for outcome in found:
        count, variant = plan.counts[outcome.variant], plan.study.variants[outcome.variant]
        twin = by_name[variant.against] if variant.against else None
        rows[outcome.variant] = {
            "preset": variant.preset,
            "options": variant.options,
            "layout": plan.config(outcome.variant).model.layout,
            "parameters": sum(count.parameters.values()),
            "active": sum(count.active.values()),
            "flops": plan.flops(outcome.variant),
            "loss": _dict(estimate(list(outcome.loss.values()))),
            "loss_difference": _dict(paired(outcome.loss, reference.loss)),
            "loss_against": _dict(paired(outcome.loss, twin.loss)) if twin else None,
            "exact_match": _dict(estimate(list(outcome.exact_match.values()))),
            "exact_match_difference": _dict(paired(outcome.exact_match, reference.exact_match)),
            "exact_match_against": _dict(paired(outcome.exact_match, twin.exact_match)) if twin else None,
            "stability": {name: _dict(value) for name, value in stability(outcome).items()},
            "seeds": list(outcome.runs),
            "failures": outcome.failures,
        }
    return {"study": plan.name, "title": plan.study.title, "tokens": plan.tokens, "variants": rows}


def _dict(value: Estimate | None) -> dict[str, Any] | None:
    return None if value is None else value._asdict()
