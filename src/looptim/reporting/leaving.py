"""Where tokens leave a loop: the signals of exits in a run at full depth, and where tokens really left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..loop import Depth, Loop
from ..loop.signals import Seen, find_signal
from ..loop.transition import Record, Transition
from ..model.lm import LoopedLM
from .template import rounded

SIGNALS = ("residual", "change", "acceleration", "kl", "entropy", "margin")
"""The exit signals whose thresholds can be tried on a page; the last three look at predictions."""


def exits_of(model: nn.Module, loop: Loop, steps: Sequence[tuple[Transition, Record]]) -> list[dict[str, Any]]:
    """The value of every signal after each step; a token leaves when it is below the threshold."""
    # A model of ours and a looped decoder of transformers both say how they read a loop.
    reader = cast(Any, model).reader()
    signals = {name: find_signal(name) for name in SIGNALS}
    memory: dict[str, Any] = dict.fromkeys(SIGNALS)
    values: dict[str, list[Any]] = {name: [] for name in SIGNALS}
    for step, (transition, record) in enumerate(steps, 1):
        hidden = loop.readout(record.Y)
        seen = Seen(step, transition, record, hidden, reader(hidden).float())
        for name, signal in signals.items():
            value, memory[name] = signal(seen, memory[name])
            values[name].append(rounded(value[0]))
    return [{"signal": name, "values": values[name]} for name in SIGNALS]


def left_by(model: nn.Module, tokens: Tensor, depth: Depth) -> dict[str, Any]:
    """After how many loops each token really left, and what the model then predicts."""
    if not depth.leaves:
        raise ValueError(f"{depth} lets no token leave; give an exit such as residual:0.05, or a number with --loops")
    logits, depths = _run(model, tokens, depth)
    top = logits[0].float().softmax(-1).max(-1)
    return {
        # What an evaluation records in full; on a page, what is so unless one asks for more goes without saying.
        "rule": str(depth).removesuffix(", prefill with exits").replace(", maximum as the layout says", ""),
        "depths": torch.stack([each[0] for each in depths]).sum(0).tolist(),
        "says": top.indices.tolist(),
        "probability": rounded(top.values),
    }


def _run(model: nn.Module, tokens: Tensor, depth: Depth) -> tuple[Tensor, Sequence[Tensor]]:
    """Logits where tokens may leave, and how many steps each of them took in each loop."""
    if isinstance(model, LoopedLM):
        hidden = model.hidden(model.embed(tokens), depth=depth)
        return model.head(hidden.h), hidden.depth
    decoder = cast(Any, model)
    before, grad_steps = decoder.unrolled.depth, decoder.unrolled.grad_steps
    decoder.set_depth(depth)
    try:
        out = decoder(tokens, use_cache=False)
    finally:
        decoder.set_depth(before, grad_steps=grad_steps)
    return out.logits, out.depth
