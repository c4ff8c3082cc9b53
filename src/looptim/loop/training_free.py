"""Damped looping of layers that nobody trained for it, as an optimizer (Chen et al., 2026)."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from ..base.numerics import wide
from .base import Context, Part
from .controls import ConstantDecay, ConstantStep
from .loop import Loop
from .maps import Map, Streams
from .objectives import Delta
from .projections import MapPart, Projection
from .registry import register
from .rules import GradientDescent
from .state import Copies
from .transition import Transition

if TYPE_CHECKING:
    from jaxtyping import Float


@final
class Column(MapPart):
    """A map with two constant entries."""

    def __init__(self, *entries: float):
        super().__init__()
        self.register_buffer("entries", torch.tensor(entries))
        self.entries: Tensor
        self.symbol = "[" + ", ".join(f"{entry:g}" for entry in entries) + "]"

    def forward(self, ctx: Context) -> Map:
        return Streams(wide(self.entries).expand(*ctx.Y.shape[:2], -1))


@final
class FirstStream(Projection):
    """`o = [1, 0] Y`: the blocks see the first of two streams."""

    symbol = "[1, 0] Y"
    map_symbol = "[1, 0]"

    def __init__(self) -> None:
        super().__init__()
        self.map = Column(1.0, 0.0)

    def forward(self, ctx: Context) -> tuple[Map, None]:
        return self.map(ctx), None


@final
class Blend(Part):
    """`h = (1 - beta) Y[0] + beta Y[1]`: where the damped steps end, and where one pass would have ended."""

    def __init__(self, beta: float):
        super().__init__()
        if not 0 <= beta <= 1:
            raise ValueError(f"beta must lie between 0 and 1, got {beta}")
        self.beta = beta
        self.symbol = f"[{1 - beta:g}, {beta:g}] Y_R"

    def forward(self, Y: Float[Tensor, "B T 2 d"]) -> Float[Tensor, "B T d"]:
        return (1 - self.beta) * Y[..., 0, :] + self.beta * Y[..., 1, :]


@register
def damped(width: int, steps: int, *, beta: float = 0.5) -> Loop:
    """Damped looping, y' = y + (Blocks(y) − y)/K, h = (1 − β) y_K + β Blocks(e), training-free (Chen et al., 2026).

    K is the number of loops, 6 as published. A second stream keeps the first pass, Blocks(e), for the read-out: the
    first step writes to it, through x = [1, K], and no other does. One loop is one pass.
    """
    transitions = [
        Transition(
            FirstStream(),
            Delta(),
            GradientDescent(ConstantStep(1 / steps), ConstantDecay(0.0)),
            write=Column(1.0, 0.0 if step else steps),
            features=None,
        )
        for step in range(steps)
    ]
    return Loop(transitions, width=width, start=Copies(2), readout=Blend(beta))
