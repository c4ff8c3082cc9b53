"""Choosing a threshold at which tokens leave the loop, and what it costs and saves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from ..base.console import Progress
from ..data import Dataset, open_data
from ..loading import load
from ..loop import Loop, Signal
from ..loop.depth import Depth, Exit, PerToken
from ..loop.signals import SIGNALS, Random, find_signal
from ..model import IGNORE, LoopedLM
from ..model.layout import Layout
from ..rundir import Evaluation, RunDir
from ..training.exit_gate import read_every_loop, token_losses, train_gate
from .frontier import compare, upper_bound
from .kinds import depth_by_kind
from .speed import decoding_speed, flops_of

LEVELS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Thresholds that are tried: these quantiles of a signal's values at full depth."""
PRICES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)
"""Prices of a loop, in nats, for the oracles."""
RISK = 0.01
"""The share of the loss that a threshold may cost, unless it is said otherwise."""
GATE_STEPS = 100
OURS = "residual"
"""The signal whose thresholds are reported in full: the local objective."""
PATIENT = f"{OURS}+1"
"""The same with one more loop, so that other tokens read a token's keys after its answer is written."""
EVERY = (*SIGNALS, "gate")
PATIENTLY = (PATIENT, "entropy+1")
"""What else is tried by default: ours, and what did best on chained assignments (docs/findings/depth.md)."""
FAIR = (*EVERY, *(f"{name}+1" for name in EVERY))
"""The signals that a study tries, each also with one more loop, which may help any of them."""


class Pair(NamedTuple):
    """A batch of held-out windows."""

    tokens: Tensor
    targets: Tensor


@final
@dataclasses.dataclass(frozen=True)
class Outcome:
    """The losses and depths of one policy that was really run."""

    loss: float
    loops: float
    """Mean over predicted tokens."""
    by_window: np.ndarray
    """The mean loss of each window."""
    depths: list[Tensor]

    def numbers(self) -> dict[str, float]:
        return {"loss": self.loss, "loops": self.loops}


@torch.no_grad()
def run_exits(model: LoopedLM, pairs: Sequence[Pair], depths: Sequence[Depth]) -> Outcome:
    """The losses and depths of some windows, each batch under its policy."""
    losses, counts, loops, seen = [], [], [], []
    for (tokens, targets), depth in zip(pairs, depths, strict=True):
        hidden = model.hidden(model.embed(tokens), depth=depth, stats=False)
        known = targets != IGNORE
        losses.append(token_losses(model.head(hidden.h), targets).sum(1))
        counts.append(known.sum(1))
        loops.append((hidden.depth[0] * known).sum(1))
        seen.append(hidden.depth[0])
    total = torch.cat(counts).double()
    by_window = torch.cat(losses).double() / total
    mean = float(torch.cat(losses).double().sum() / total.sum())
    return Outcome(mean, float(torch.cat(loops).double().sum() / total.sum()), by_window.cpu().numpy(), seen)


@final
@dataclasses.dataclass(frozen=True)
class Held:
    """Held-out windows to choose by and to report on, and what comes of them at full depth."""

    choose: list[Pair]
    report: list[Pair]
    chosen: Outcome
    reported: Outcome
    losses: list[Tensor]
    """Of the windows to choose by, after every loop: (R, B, T) for each batch."""

    @classmethod
    def of(cls, model: LoopedLM, choose: list[Pair], report: list[Pair]) -> Held:
        full = [run_exits(model, pairs, [Exit(OURS, 0.0)] * len(pairs)) for pairs in (choose, report)]
        return cls(choose, report, *full, [read_every_loop(model, *pair)[0] for pair in choose])


@final
class Listener(Signal):
    """Records all signals at once at full depth, in a walk that no token leaves."""

    def __init__(self, signals: dict[str, Signal], asks: Any):
        super().__init__()
        self.asks = asks
        self.signals = torch.nn.ModuleDict(signals)
        self.heard: dict[str, list[Tensor]] = {name: [] for name in signals}

    def forward(self, seen: Any, memory: Any) -> tuple[Tensor, Any]:
        memory = memory or dict.fromkeys(self.heard)
        for name, signal in self.signals.items():
            value, memory[name] = signal(seen, memory[name])
            self.heard[name].append(value)
        return torch.full(seen.record.Y.shape[:2], torch.inf, device=seen.record.Y.device), memory


@torch.no_grad()
def listen(model: LoopedLM, pairs: Sequence[Pair], signals: dict[str, Signal]) -> dict[str, list[Tensor]]:
    """Every signal's values at full depth, (R - 1, B, T) for each batch."""
    found: dict[str, list[Tensor]] = {name: [] for name in signals}
    coda = {name: signal for name, signal in signals.items() if signal.asks == "coda"}
    plain = {name: signal for name, signal in signals.items() if name not in coda}
    for some, asks in ((plain, "logits"), (coda, "coda")):
        for tokens, _ in pairs if some else ():
            listener = Listener(some, asks)
            model.hidden(model.embed(tokens), depth=Exit(listener, 1.0), stats=False)
            for name, values in listener.heard.items():
                found[name].append(torch.stack(values))
    return found


def evaluate_exits(
    path: str | Path,
    *,
    risk: float = RISK,
    confidence: float = 0.95,
    windows: int = 64,
    speed: bool = True,
    only: Sequence[str] | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Choose thresholds on half of some held-out windows, report on the other half; prefill has exits too.

    For each signal thresholds are tried from the safest on, for real, until one is not shown, at `confidence`, to raise
    the loss by at most the share `risk` (of a loss below 1 nat: by `risk` nats); the last that was is chosen. One after
    another in a fixed order, these tests need no correction for their number. `only` names the signals to try beside
    the local objective, such as `kl` or, with a patience, `kl+1`; by default all, and two of them with patience.
    """
    if not 0 < risk < 1 or not 0.5 <= confidence < 1:
        raise ValueError(f"risk and confidence must be shares, confidence at least 0.5; got {risk} and {confidence}")
    if windows < 8:
        raise ValueError(f"windows must be at least 8, half of them to choose by, got {windows}")
    model, tokenizer = load(path)
    config = RunDir(path).config()
    data = open_data(config.data, vocab_size=config.model.vocab_size, seq_len=config.train.seq_len, progress=not quiet)
    size = min(32, windows // 4)
    with Progress("exits", show=not quiet) as progress:
        rules = _rules(model, data, size, only)
        progress.expect(len(rules) + 1 + speed)
        held = Held.of(model, _pairs(data, windows // 2, size, first=0), _pairs(data, windows // 2, size, first=1))
        signals = {name.partition("+")[0]: cast(Signal, rule(0).signal) for name, rule in rules}
        heard = listen(model, held.choose, signals)
        rows = {}
        for name, rule in rules:
            rows[name] = _one_signal(model, rule, heard[name.partition("+")[0]], held, risk, confidence)
            progress.advance(1)
        record = {
            "settings": {
                "risk": risk,
                "confidence": confidence,
                "windows": windows,
                "tokens": windows * config.train.seq_len,
                "prefill": "with exits",
                "layout": config.model.layout,
                "preset": config.model.loop.preset,
                "options": config.model.loop.options,
                "source": config.data.source,
                "seed": config.train.seed,
            },
            "signals": rows,
            **_controls(model, data, held.report, rows[OURS]),
            "fixed": _fixed(model, held, risk, confidence),
        }
        compare(record)
        best = Exit(OURS, rows[OURS]["chosen"]["threshold"])
        shown = run_exits(model, held.report, [best] * len(held.report))
        record["kinds"] = depth_by_kind(held.report, shown.depths, tokenizer, data)
        record["flops"] = flops_of(config.model, rows[OURS]["chosen"]["loops"])
        progress.advance(1)
        if speed:
            record["speed"] = decoding_speed(model, best, held.report[0].tokens)
    files = RunDir(path).exits if out is None else Evaluation(Path(out), "exits")
    files.write(files.result, record)
    return record | {"file": str(files.result)}


def _rules(
    model: LoopedLM, data: Dataset, size: int, only: Sequence[str] | None
) -> list[tuple[str, Callable[[float], Exit]]]:
    """The exits that a model may have by their threshold, with a gate trained for it, or some of them."""
    names = [*EVERY, *PATIENTLY] if only is None else [*dict.fromkeys([OURS, *only])]
    coda, rules, made = Layout.of(model.config).coda, [], dict[str, Signal]()
    for name in names:
        signal, _, patience = name.partition("+")
        if signal not in made:
            made[signal] = train_gate(model, _training(data, size)) if signal == "gate" else find_signal(signal)
        if coda or made[signal].asks != "coda":
            rules.append((name, partial(Exit, made[signal], patience=int(patience or 0))))
    return rules


def _pairs(data: Dataset, windows: int, size: int, *, first: int) -> list[Pair]:
    """Every second batch of the held-out windows, starting with `first`."""
    steps = range(first, 2 * math.ceil(windows / size), 2)
    batches = [data.batch("valid", seed=0, step=step, batch_size=size) for step in steps]
    return [Pair(batch.tokens, batch.targets) for batch in batches]


def _training(data: Dataset, size: int) -> list[tuple[Tensor, Tensor]]:
    """What the gate learns from: batches of another order than the model's."""
    batches = [data.batch("train", seed=10_007, step=step, batch_size=size) for step in range(GATE_STEPS)]
    return [(batch.tokens, batch.targets) for batch in batches]


def _one_signal(
    model: LoopedLM,
    rule: Callable[[float], Exit],
    heard: list[Tensor],
    held: Held,
    risk: float,
    confidence: float,
) -> dict[str, Any]:
    """A signal's curve on the windows to report on, and the threshold that the others chose."""
    choose, report, full = held.choose, held.report, held.chosen
    values = torch.cat([value.flatten() for value in heard])
    values = values[values < torch.finfo(values.dtype).max]
    # A signal that compares three steps says nothing in a loop of three.
    levels = LEVELS if len(values) else ()
    # A signal that is never negative may be rounded below zero.
    thresholds = sorted({max(float(torch.quantile(values[:1_000_000], level)), 0.0) for level in levels}) or [0.0]
    accepted, open_ = 0.0, True
    curve = []
    for threshold in thresholds:
        depth = rule(threshold)
        if open_:
            tried = run_exits(model, choose, [depth] * len(choose))
            open_ = upper_bound(tried.by_window - full.by_window, confidence) <= risk * max(full.loss, 1.0)
            accepted = threshold if open_ else accepted
        curve.append({"threshold": threshold, **run_exits(model, report, [depth] * len(report)).numbers()})
    chosen = run_exits(model, report, [rule(accepted)] * len(report))
    full = held.reported
    shares = torch.bincount(torch.cat([d.flatten() for d in chosen.depths]), minlength=int(full.loops) + 1)[1:]
    return {
        "screened": _screened(held.losses, choose, heard, [rule(threshold) for threshold in thresholds]),
        "curve": curve,
        "chosen": {
            "threshold": accepted,
            **chosen.numbers(),
            "more loss": chosen.loss - full.loss,
            "more loss at most": upper_bound(chosen.by_window - full.by_window, confidence),
        },
        "histogram": (shares / shares.sum()).tolist(),
    }


def _screened(
    traces: Sequence[Tensor], pairs: Sequence[Pair], heard: list[Tensor], exits: Sequence[Exit]
) -> list[dict[str, float]]:
    """What each threshold would give if no exit changed what other tokens read, from the full-depth trace alone."""
    rows = []
    for each in exits:
        total = np.zeros(3)
        for losses, values, (_, targets) in zip(traces, heard, pairs, strict=True):
            stays = (~(values < each.threshold)).cumprod(0).sum(0, keepdim=True)
            last = (stays + each.patience).clamp(max=len(losses) - 1)
            known = targets != IGNORE
            left = losses.gather(0, last)[0]
            total += [float(left[known].sum()), float((last[0] + 1)[known].sum()), int(known.sum())]
        rows.append({"threshold": each.threshold, "loss": total[0] / total[2], "loops": total[1] / total[2]})
    return rows


def _controls(model: LoopedLM, data: Dataset, report: Sequence[Pair], residual: dict[str, Any]) -> dict[str, Any]:
    """The static frontier, random exits with the shares of the chosen one, and oracles that know every loss."""
    loop = model.loops[0]
    assert isinstance(loop, Loop)
    static = [run_exits(model, report, [_equally(steps)] * len(report)).numbers() for steps in range(1, loop.steps + 1)]
    torch.manual_seed(0)
    random = run_exits(model, report, [Exit(Random(residual["histogram"]), 1.0)] * len(report)).numbers()
    traces = [read_every_loop(model, *pair)[0] for pair in report]
    policies = [_oracle(report, traces, price, more) for more in (0, 1) for price in PRICES]
    hops = [each for tokens, _ in report if (each := data.difficulty_of(tokens)) is not None]
    if len(hops) == len(report):
        # Each loop follows one hop, and the first loop reads a problem's first two statements.
        policies += [[PerToken((each.clamp(1) + more).clamp(max=loop.steps)) for each in hops] for more in (0, 1)]
    oracle = [run_exits(model, report, policy).numbers() for policy in policies]
    return {"static": static, "random": random, "oracle": oracle}


def _equally(steps: int) -> Exit:
    """An exit by which every token takes this many steps, whatever its signal."""
    return Exit("change", math.inf, minimum=steps)


def _fixed(model: LoopedLM, held: Held, risk: float, confidence: float) -> dict[str, float]:
    """The smallest fixed depth that the risk bound allows, which a threshold must beat."""
    full = held.chosen
    allowed = steps = cast(Loop, model.loops[0]).steps
    for fewer in range(steps - 1, 0, -1):
        tried = run_exits(model, held.choose, [_equally(fewer)] * len(held.choose))
        if upper_bound(tried.by_window - full.by_window, confidence) > risk * max(full.loss, 1.0):
            break
        allowed = fewer
    found = run_exits(model, held.report, [_equally(allowed)] * len(held.report))
    return found.numbers() | {"more loss": found.loss - held.reported.loss}


def _oracle(pairs: Sequence[Pair], traces: Sequence[Tensor], price: float, more: int) -> list[PerToken]:
    """The depth at which each token's loss and a price for its loops are smallest; tokens without target go through.

    That is what is best for the token itself. Others read the keys it had in its last loop, which saw what the loop
    before had computed; so that they see its answer, it may stay some loops `more`.
    """
    policies = []
    for (_, targets), losses in zip(pairs, traces, strict=True):
        priced = losses + price * torch.arange(len(losses)).reshape(-1, 1, 1)
        depth = (priced.argmin(0) + 1 + more).clamp(max=len(losses))
        policies.append(PerToken(torch.where(targets != IGNORE, depth, len(losses))))
    return policies
