"""Ouro's second stage: a gate that learns, on a frozen model, where one more loop helps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..loop import Loop
from ..loop.depth import Fixed
from ..loop.signals import Gate
from ..model import IGNORE, LoopedLM

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@torch.no_grad()
def read_every_loop(
    model: LoopedLM, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "R B T"], Float[Tensor, "R B T d"]]:
    """Each token's loss if it were read out after loop 1, 2, ..., R, and the loop's output there.

    All loops run. A target of -100 has a loss of 0.
    """
    steps = [segment.loops for segment in model.config.segments if segment.loops is not None]
    if len(steps) != 1 or steps[0] is None:
        raise ValueError(f"exits need a model with one loop, and layout {model.config.layout!r} has {len(steps)}")
    states: list[Tensor] = []

    def keep(module: Any, args: Any, h: Any) -> None:
        states.append(h)

    handle = cast(Loop, model.loops[0]).readout.register_forward_hook(keep)
    try:
        hidden = model.hidden(model.embed(tokens), depth=Fixed(steps[0], tuple(range(1, steps[0]))), stats=False)
    finally:
        handle.remove()
    losses = [token_losses(model.head(h), targets) for h in (*hidden.early, hidden.h)]
    return torch.stack(losses), torch.stack(states)


def token_losses(logits: Float[Tensor, "B T vocab"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The cross entropy of each token; 0 if the target is ignored."""
    flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return flat.view(targets.shape)


def train_gate(model: LoopedLM, batches: Iterable[tuple[Tensor, Tensor]], *, lr: float = 1e-2) -> Gate:
    """A gate trained by what each loop gained (Ouro, stage II); the model is not changed.

        I_l = max(0, L_{l-1} - L_l),  w_l = sigmoid(50 (I_l - 0.005)),  loss = BCE(1 - lam_{l-1}, w_l)

    `batches` are pairs of tokens and targets; a target of -100 teaches nothing.
    """
    gate = Gate(model.config.width).to(model.embedding.weight.device)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=lr, weight_decay=0.0)
    for tokens, targets in batches:
        losses, states = read_every_loop(model, tokens, targets)
        helps = torch.sigmoid(50 * ((losses[:-1] - losses[1:]).clamp_min(0) - 0.005))
        logits = gate.stay(states[:-1])
        known = (targets != IGNORE).expand_as(logits)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(logits[known], helps[known]).backward()
        optimizer.step()
    return gate.requires_grad_(False).eval()
