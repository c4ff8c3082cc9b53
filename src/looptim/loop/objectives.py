"""Local objectives `L = f(o)` with the target `t = Blocks(o)` held fixed: `value` and its derivative `grad`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from ..base.numerics import floored_norm, wide
from .base import Part

if TYPE_CHECKING:
    from jaxtyping import Float


class Objective(Part):
    """`f(o)` and `f'(o)`. `value` is per token, so it can also decide when a token has looped enough."""

    @abstractmethod
    def value(self, o: Float[Tensor, "B T d"], t: Float[Tensor, "B T d"]) -> Float[Tensor, "B T"]:
        """`f(o)`, one number per token."""

    @abstractmethod
    def grad(self, o: Float[Tensor, "B T d"], t: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        """`f'(o)`."""

    def residual(self, o: Float[Tensor, "B T d"], t: Float[Tensor, "B T d"]) -> Float[Tensor, "B T"]:
        """`|t - o| / |t|`: how far a token is from its target, independent of scale."""
        return torch.linalg.vector_norm(wide(t) - wide(o), dim=-1) / floored_norm(wide(t)).squeeze(-1)


class Alignment(Objective):
    """An objective that only asks `o` to point where `t` points. It is unbounded, so its residual is an angle's."""

    def residual(self, o: Tensor, t: Tensor) -> Tensor:
        """`1 - cos(t, o)`."""
        return 1 - (_unit(wide(o)) * _unit(wide(t))).sum(-1)


@final
class InnerProduct(Alignment):
    """`L = -<o, t>`, `f'(o) = -t` (Eq. 17): the objective hidden in every published transition but one.

    >>> InnerProduct().grad(torch.tensor([[[5.0]]]), torch.tensor([[[2.0]]]))
    tensor([[[-2.]]])
    """

    symbol = "−⟨t, o⟩"

    def value(self, o: Tensor, t: Tensor) -> Tensor:
        return -(wide(o) * wide(t)).sum(-1)

    def grad(self, o: Tensor, t: Tensor) -> Tensor:
        return -t


@final
class NormalizedInnerProduct(Alignment):
    """`L = -<o, t/|t|>`, `f'(o) = -t/|t|`: Recirculation's row of Table 7.

    >>> NormalizedInnerProduct().grad(torch.zeros(1, 1, 2), torch.tensor([[[3.0, 4.0]]]))
    tensor([[[-0.6000, -0.8000]]])
    """

    symbol = "−⟨t/‖t‖, o⟩"

    def value(self, o: Tensor, t: Tensor) -> Tensor:
        return -(wide(o) * _unit(wide(t))).sum(-1)

    def grad(self, o: Tensor, t: Tensor) -> Tensor:
        return -_unit(wide(t)).to(t.dtype)


def _unit(x: Tensor) -> Tensor:
    return x / floored_norm(x)


@final
class Delta(Objective):
    """`L = 1/2 |o - t|^2`, `f'(o) = o - t` (Eq. 18): OperLoop's, after the delta rule of linear attention.

    With `Blocks(o) = o + D(o)` the error is `-D(o)`, so the copy path of the blocks' residuals adds nothing to the
    state.

    >>> Delta().grad(torch.tensor([[[5.0]]]), torch.tensor([[[2.0]]]))
    tensor([[[3.]]])
    """

    symbol = "½‖t − o‖²"

    def value(self, o: Tensor, t: Tensor) -> Tensor:
        return 0.5 * (wide(o) - wide(t)).square().sum(-1)

    def grad(self, o: Tensor, t: Tensor) -> Tensor:
        return o - t


@final
class PseudoHuber(Objective):
    """`L = d c^2 (sqrt(1 + |o - t|^2 / (d c^2)) - 1)`: the delta objective near the target, linear far from it.

    `f'(o) = (o - t) / sqrt(1 + |o - t|^2 / (d c^2))`: no written error exceeds `c` in root mean square, so a single
    outlier token cannot destroy its state. Robust regression after Huber (1964), in Charbonnier's smooth form.

    >>> PseudoHuber(c=1.0).grad(torch.full((1, 1, 1), 1e6), torch.zeros(1, 1, 1))
    tensor([[[1.]]])
    """

    symbol = "Huber_c(t − o)"
    where = "Huber_c(u) = d c² (√(1 + ‖u‖²/(d c²)) − 1)"

    def __init__(self, c: float = 1.0):
        super().__init__()
        if c <= 0:
            raise ValueError(f"c, the largest error written in root mean square, must be positive, got {c}")
        self.c = c

    def value(self, o: Tensor, t: Tensor) -> Tensor:
        u = wide(o) - wide(t)
        return u.shape[-1] * self.c**2 * (self._bend(u).squeeze(-1) - 1)

    def grad(self, o: Tensor, t: Tensor) -> Tensor:
        u = wide(o) - wide(t)
        return (u / self._bend(u)).to(o.dtype)

    def _bend(self, u: Tensor) -> Tensor:
        return torch.sqrt(1 + u.square().mean(-1, keepdim=True) / self.c**2)
