"""The pre-norm decoder block."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        attend: Attend,
        rope: tuple[Tensor, Tensor],
        visit: int | Int[Tensor, ""] = 0,
        stats: bool = True,
        live: Bool[Tensor, "batch length"] | None = None,
    ) -> tuple[Float[Tensor, "batch length width"], MoEStats | None]:
        x = x + self.attention(self.attention_norm(x), attend, rope)
        h = self.feedforward_norm(x)
        if isinstance(self.feedforward, MoE):
            y, seen = self.feedforward(h, visit, stats=stats, live=live)
            return x + y, seen
        return x + self.feedforward(h), None
