"""What runs are judged by, what a study's runs show, and how steady training was."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ..data import GRADED, open_data, text_of
from ..rundir import Run, RunDir, difference
from .grid import answers_of, divergence, exits_of, is_finished, is_settled, task_of
from .spec import Cell, Plan
from .statistics import Estimate, Model, check, differences, estimate, fit, seeds_needed

SPIKE = 0.3
"""A logged loss this many nats above the mean of the ten before it is called a spike."""

LAST = 0.2
"""The share of updates, at the end of training, over which the training loss is averaged."""


@final
@dataclasses.dataclass(frozen=True)
class Outcome:
    """The runs of one variant by seed, and their measurements."""

    variant: str
    runs: dict[int, Run]
    """Finished ones."""
    failures: dict[int, str]
    loss: dict[int, float]
    """The last validation loss, in nats per token."""
    training_loss: dict[int, float]
    """The mean over the last fifth of the updates, in nats per token; empty if any text repeats."""
    exact_match: dict[int, float]
    """Shares of right answers on the task that the runs learn; empty for text."""
    hops: dict[int, dict[str, list[float]]]
    """Of a task of known difficulty: shares by loops, then by difficulty; empty elsewhere."""
    exits: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """What it costs and saves when tokens leave early; empty where the study does not ask."""


class Measure(NamedTuple):
    """What a finished run is judged by."""

    key: str
    heading: str
    unit: str
    better: str
    of: Callable[[Outcome], Mapping[int, float]]
    """The value of every seed."""
    size: float
    """A difference one would like to be able to detect."""
    form: str
    percent: bool = False
    """Whether it is a share, printed from 0 to 1 in figures and files and as a percentage in tables."""


MEASURES = (
    Measure("loss", "validation loss", "nats per token", "less", lambda outcome: outcome.loss, 0.01, "{:.4f}"),
    Measure(
        "training_loss",
        "training loss, last fifth",
        "nats per token",
        "less",
        lambda outcome: outcome.training_loss,
        0.01,
        "{:.4f}",
    ),
    Measure(
        "exact_match",
        "exact match",
        "share of problems",
        "more",
        lambda outcome: outcome.exact_match,
        0.1,
        "{:.1f}",
        percent=True,
    ),
)


@final
@dataclasses.dataclass(frozen=True)
class Comparison:
    """What the runs of a study show about the variants by one measure."""

    measure: Measure
    model: Model
    to_reference: dict[str, Estimate | None]
    """The difference of every variant to the reference, with simultaneous intervals."""
    to_twin: dict[str, Estimate | None]
    """The same for the other comparisons of variants, again with simultaneous intervals."""

    def seeds_needed(self, difference: float) -> int | None:
        """The number of seeds that would show a difference to the reference."""
        return seeds_needed(difference, self.model, max(1, len(self.model.table) - 1))


def compare(plan: Plan, found: Sequence[Outcome]) -> list[Comparison]:
    """The variants by every measure that has numbers."""
    twins = {name: variant.against for name, variant in plan.study.variants.items() if variant.against}
    made = []
    for measure in MEASURES:
        model = fit({outcome.variant: measure.of(outcome) for outcome in found})
        if model.table:
            against = dict.fromkeys(model.table, plan.study.reference)
            made.append(Comparison(measure, model, _minus(model, against), _minus(model, twins)))
    return made


def _minus(model: Model, against: Mapping[str, str]) -> dict[str, Estimate | None]:
    return {pair[0]: value for pair, value in differences(model, list(against.items())).items()}


def check_runs(plan: Plan, runs: Path, *, progress: bool) -> None:
    """Open the data if a run is missing, and check existing runs, before hours go into others."""
    for cell in plan.cells:
        _check_config(cell, RunDir(runs / cell.name))
    if all(is_settled(cell, runs) for cell in plan.cells):
        return
    config = plan.cells[0].config
    if task_of(config) not in (None, *GRADED) and importlib.util.find_spec("transformers") is None:
        raise ValueError("a study of a task asks its runs through transformers; pip install 'looptim[hf]'")
    data = open_data(
        config.data, vocab_size=config.model.vocab_size, seq_len=config.train.seq_len, progress=progress
    ).fingerprint
    outcomes(plan, runs, seen={_name(data): "the runs that are missing"})


def _check_config(cell: Cell, run: RunDir) -> None:
    """Check that a run has the config that its name stands for; a default of looptim may have changed."""
    changes = difference(run.config(), cell.config) if run.config_file.is_file() else []
    if changes:
        raise ValueError(
            f"the run {run.path} has another config ({'; '.join(changes)}); give another --out (and --runs)"
        )


def outcomes(plan: Plan, runs: Path, *, seen: Mapping[str, str] | None = None) -> list[Outcome]:
    """The settled runs of every variant, checked to be complete and to have seen the same data as those in `seen`."""
    found = {name: Outcome(name, {}, {}, {}, {}, {}, {}) for name in plan.study.variants}
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
            data = run.environment["data"]
            answers = _answers(cell, runs)
            right = None if answers is None else answers["results"]["exact_match,none"]
            hops = answers["loops"] if answers is not None and task_of(cell.config) in GRADED else None
            asked = exits_of(cell, runs)
            exits = None if asked is None else json.loads(asked.read_text())
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the run {runs / cell.name} is damaged ({error}); delete it to train it again") from None
        seen.setdefault(_name(data), f"the run {cell.name}")
        loss = float(run.column("valid_loss")[1][-1])
        if not math.isfinite(loss):
            outcome.failures[cell.seed] = "its last validation loss is not finite"
            continue
        outcome.runs[cell.seed] = run
        outcome.loss[cell.seed] = loss
        if is_fresh(cell, data):
            outcome.training_loss[cell.seed] = training_loss(run, cell.config.train.steps)
        if right is not None:
            outcome.exact_match[cell.seed] = right
        if hops is not None:
            outcome.hops[cell.seed] = hops
        if exits is not None:
            outcome.exits[cell.seed] = exits
    if len(seen) > 1:
        raise ValueError(
            f"{' and '.join(list(seen.values())[:2])} in {runs} see different data, so they cannot be compared; "
            "give another --out (and --runs)"
        )
    return list(found.values())


def running(plan: Plan, runs: Path) -> dict[str, Run]:
    """The runs that have begun to log and are not settled, by variant and seed."""
    found = {}
    for cell in plan.cells:
        run = RunDir(runs / cell.name)
        if run.path.is_dir() and not is_settled(cell, runs) and "loss" in run.metrics.last("loss"):
            name = f"{cell.variant}, seed {cell.seed}"
            found[name] = run.read(name)
    return found


def _name(data: Mapping[str, Any]) -> str:
    """What distinguishes one text from another, as a key."""
    return json.dumps(text_of(data), sort_keys=True)


def is_fresh(cell: Cell, data: Mapping[str, Any]) -> bool:
    """Whether every batch of a run was unseen text: less than an epoch, at the depth of the layout.

    An endless task counts as no, since its problems may repeat.
    """
    settings, tokens = cell.config.train, data.get("train_tokens", 0)
    windows = (tokens - 1) // settings.seq_len
    return settings.steps * settings.batch_size <= windows and settings.loops.scheme == "fixed"


def training_loss(run: Run, steps: int) -> float:
    """The prequential loss at the end of a run: the mean of the losses logged in the last fifth of the updates.

    The loss of an update is measured before the weights move. If text is seen only once, every batch is held-out text,
    far more than a validation reads, and the same for all variants of a seed.
    """
    return float(np.mean([line["loss"] for line in run.lines if "loss" in line and line["step"] > (1 - LAST) * steps]))


def _read(cell: Cell, runs: Path) -> Run:
    """A finished run with all its metrics; unlike its checkpoint, these may be cut short by a power loss."""
    run, settings = RunDir(runs / cell.name).read(f"{cell.variant}, seed {cell.seed}"), cell.config.train
    logged = [line["step"] for line in run.lines if "loss" in line]
    validated = [line["step"] for line in run.lines if "valid_loss" in line]
    if logged != [*range(settings.log_every, settings.steps, settings.log_every), settings.steps]:
        raise ValueError("its metrics lack updates")
    if validated[-1:] != [settings.steps]:
        raise ValueError("its metrics lack the last validation")
    return run


def _answers(cell: Cell, runs: Path) -> dict[str, Any] | None:
    answers = answers_of(cell, runs)
    return None if answers is None else json.loads(answers.read_text())


def spikes(run: Run) -> int:
    """The number of losses that stand out from the ten logged before them."""
    loss = run.column("loss")[1]
    if len(loss) <= 10:
        return 0
    means = np.convolve(loss, np.ones(10) / 10, "valid")[:-1]
    return int((loss[10:] > means + SPIKE).sum())


def growth(run: Run) -> list[NDArray]:
    """The state's RMS relative to that before the first loop: per looped segment, one row per validation."""
    _, norms = run.columns("state_norm")
    if not norms.size:
        return []
    ends = np.cumsum([times + 1 for times in run.loops])[:-1]
    return [part / part[:, :1] for part in np.split(norms, ends, axis=1)]


def state_growth(run: Run) -> tuple[float, float] | None:
    """The growth of the state up to the last loop, before and after training.

    With several looped segments, that of the one that grows most.
    """
    last = [part[:, -1] for part in growth(run)]
    return (float(max(g[0] for g in last)), float(max(g[-1] for g in last))) if last else None


def stability(outcome: Outcome) -> dict[str, Estimate | None]:
    """Means over seeds of the numbers that tell how steady training was."""
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


def data_of(found: Sequence[Outcome]) -> dict[str, Any]:
    """The fingerprint of the text that all runs have seen; empty if there are no runs."""
    return next((run.environment["data"] for outcome in found for run in outcome.runs.values()), {})


def as_json(plan: Plan, found: Sequence[Outcome], compared: Sequence[Comparison]) -> dict[str, Any]:
    """Every number of the tables, for programs."""
    rows = {}
    for outcome in found:
        count, variant = plan.counts[outcome.variant], plan.study.variants[outcome.variant]
        rows[outcome.variant] = {
            "preset": variant.preset,
            "options": variant.options,
            "noncausal": variant.noncausal,
            "layout": plan.config(outcome.variant).model.layout,
            "parameters": sum(count.parameters.values()),
            "active": sum(count.active.values()),
            "flops": plan.flops(outcome.variant),
            "tokens": plan.tokens_of(outcome.variant),
            **{measure.key: _dict(estimate(list(measure.of(outcome).values()))) for measure in MEASURES},
            **{f"{each.measure.key}_difference": _dict(each.to_reference.get(outcome.variant)) for each in compared},
            **{f"{each.measure.key}_against": _dict(each.to_twin.get(outcome.variant)) for each in compared},
            "stability": {name: _dict(value) for name, value in stability(outcome).items()},
            "seeds": list(outcome.runs),
            "failures": outcome.failures,
        }
    models = {each.measure.key: _model(each) for each in compared}
    head = {"study": plan.name, "title": plan.study.title, "tokens": plan.tokens, "reference": plan.study.reference}
    return {**head, "data": data_of(found), "models": models, "variants": rows}


def _model(compared: Comparison) -> dict[str, Any]:
    model, checked, size = compared.model, check(compared.model), compared.measure.size
    return {
        "residual_sd": model.sd,
        "degrees_of_freedom": model.df,
        "check": checked and checked._asdict(),
        "seeds_needed": {str(size): compared.seeds_needed(size)},
    }


def _dict(value: Estimate | None) -> dict[str, Any] | None:
    return None if value is None else value._asdict()
