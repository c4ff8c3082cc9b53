"""The pre-norm decoder block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import Attend, Attention
from .moe import MoE, MoEStats, SwiGLU
from .norm import RMSNorm

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class Block(nn.Module):
    """The weights of one layer. It attends through the slot it is given and does not know that it is looped.

    x <- x + attention(norm(x)),  x <- x + feedforward(norm(x)). Tokens that are not `live` reach no routed expert.
    """

    def __init__(self, attention: Attention, feedforward: SwiGLU | MoE, *, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width, eps)
        self.attention = attention
        self.feedforward_norm = RMSNorm(width, eps)
        self.feedforward = feedforward
        self.halves = EAGER

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        attend: Attend,
        rope: tuple[Tensor, Tensor],
        visit: int | Int[Tensor, ""] = 0,
        stats: bool = True,
        live: Bool[Tensor, "batch length"] | None = None,
    ) -> tuple[Float[Tensor, "batch length width"], MoEStats | None]:
        run = self.halves
        return run.feed(self, run.attend(self, x, attend, rope), visit, stats, live)

    def compile(self, **options: Any) -> None:
        """Compile the two halves, each once for all blocks and visits that are alike in it.

        Compiled as a whole, every pairing of an attention kind with a kind of feed-forward would be compiled.
        """
        self.halves = Halves(torch.compile(attend_half, **options), torch.compile(feed_half, **options))


def attend_half(block: Block, x: Tensor, attend: Attend, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x + attention(norm(x))."""
    return x + block.attention(block.attention_norm(x), attend, rope)


def feed_half(
    block: Block, x: Tensor, visit: int | Tensor, stats: bool, live: Tensor | None
) -> tuple[Tensor, MoEStats | None]:
    """x + feedforward(norm(x))."""
    h = block.feedforward_norm(x)
    if isinstance(block.feedforward, MoE):
        y, seen = block.feedforward(h, visit, stats=stats, live=live)
        return x + y, seen
    return x + block.feedforward(h), None


class Halves(NamedTuple):
    """The functions that run a block, either plain or compiled."""

    attend: Callable[..., Tensor]
    feed: Callable[..., tuple[Tensor, MoEStats | None]]


EAGER = Halves(attend_half, feed_half)
