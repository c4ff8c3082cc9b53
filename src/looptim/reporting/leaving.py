"""Where tokens leave a loop: the signals of exits in a run at full depth, and where tokens really left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..loop import Depth, Loop
from ..loop.signals import Seen, find_signal
from ..loop.transition import Record, Transition
from ..model.lm import LoopedLM
from .template import rounded

EXITS = ("residual", "change", "acceleration")
"""The exit signals that need no prediction, only what a loop itself knows about its tokens."""
PREDICTING = ("kl", "entropy", "margin")
"""The exit signals that need a prediction, for models of our own."""


def exits_of(model: nn.Module, loop: Loop, steps: Sequence[tuple[Transition, Record]]) -> list[dict[str, Any]]:
    """The value of every signal after each step; a token leaves when it is below the threshold."""
    reader = model.reader() if isinstance(model, LoopedLM) else None
    names = EXITS + (() if reader is None else PREDICTING)
    signals = {name: find_signal(name) for name in names}
    memory: dict[str, Any] = dict.fromkeys(names)
    values: dict[str, list[Any]] = {name: [] for name in names}
    for step, (transition, record) in enumerate(steps, 1):
        hidden = loop.readout(record.Y)
        seen = Seen(step, transition, record, hidden, None if reader is None else reader(hidden).float())
        for name, signal in signals.items():
            value, memory[name] = signal(seen, memory[name])
            values[name].append(rounded(value[0]))
    return [{"signal": name, "values": values[name]} for name in names]


def left_by(model: nn.Module, tokens: Tensor, depth: Depth) -> dict[str, Any]:
    """After how many loops each token really left, and what the model then predicts."""
    if not depth.leaves:
        raise ValueError(f"{depth} lets no token leave; give an exit such as residual:0.05, or a number with --loops")
    if not isinstance(model, LoopedLM):
        raise ValueError("tokens cannot leave the loop of a foreign decoder one by one; leave depth out")
    hidden = model.hidden(model.embed(tokens), depth=depth)
    top = model.head(hidden.h)[0].float().softmax(-1).max(-1)
    return {
        "rule": str(depth),
        "depths": torch.stack([each[0] for each in hidden.depth]).sum(0).tolist(),
        "says": top.indices.tolist(),
        "probability": rounded(top.values),
    }
