"""Update rules: how the gradient of the local objective moves the state.

Every rule has a `step` and a `decay` and may keep a memory across loops. `rule.init(Y_0)` makes what is carried,
`rule(Y, G, ctx, carry)` gives the next state and the next carry. A rule sees the written gradient `G = x^T f'(o)` only:
it does not know which projection or objective it came from.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from ..base.numerics import full_precision, polar, wide
from .base import Context, Part, require
from .controls import ConstantDecay, Decay, Step, StreamMatrix

if TYPE_CHECKING:
    from jaxtyping import Float


class Carry(NamedTuple):
    """What a rule hands from one loop to the next."""

    eta: float | Tensor
    """The step size just used; before the first step, 1."""
    lam: float | Tensor | StreamMatrix
    """The decay just used."""
    memory: Any
    """What a rule remembers, any tree of tensors that begin with the axes (B, T), or None."""


class Rule(Part):
    """An optimizer update rule on the state. `symbol` is its equation, with `G = x^T f'(o)`."""

    def __init__(self, step: Step, decay: Decay):
        super().__init__()
        require("step", step, Step)
        require("decay", decay, Decay)
        self.step = step
        self.decay = decay

    def init(self, Y: Float[Tensor, "B T r d"]) -> Carry:
        """`eta_{-1} = 1` and no memory."""
        # Tied to Y by a zero, so that the first step sees the same kind of tensor (gradient or not) as the later
        # ones: one compilation then serves all steps.
        return Carry(eta=1 + 0 * wide(Y[..., :1, :1]), lam=0.0, memory=None)

    @abstractmethod
    def forward(
        self, Y: Float[Tensor, "B T r d"], G: Float[Tensor, "B T r d"], ctx: Context, carry: Carry
    ) -> tuple[Float[Tensor, "B T r d"], Carry]:
        """The next state and the next carry."""


def descend(Y: Tensor, direction: Tensor, eta: float | Tensor, lam: float | Tensor | StreamMatrix) -> Tensor:
    """`(I - eta Lam) Y - eta direction` (Eq. 8).

    >>> descend(torch.tensor(4.0), torch.tensor(1.0), 0.5, 0.5)
    tensor(2.5000)
    """
    if isinstance(lam, StreamMatrix):
        with full_precision(Y):
            kept = Y - eta * (lam.matrix @ Y.to(lam.matrix.dtype))
    else:
        keep = 1 - eta * lam
        if isinstance(keep, float) and keep == 0.0:
            return (-eta * direction).to(Y.dtype)
        kept = keep * Y
    # eta, lam and a written gradient are in fp32 or wider, so that a bf16 state is rounded here and only here.
    return (kept - eta * direction).to(Y.dtype)


@final
class GradientDescent(Rule):
    """`Y' = (I - eta Lam) Y - eta G`: Proposition 1 (Eq. 8), the rule of every row of the paper's tables.

    >>> from looptim.loop.controls import ConstantDecay, ConstantStep
    >>> rule, Y = GradientDescent(ConstantStep(), ConstantDecay()), torch.ones(1, 1, 1, 2)
    >>> rule(Y, -3 * Y, Context(Y, None, None), rule.init(Y))[0]
    tensor([[[[3., 3.]]]])
    """

    symbol = "Y′ = (1 − ηλ) Y − η G"

    def forward(self, Y: Tensor, G: Tensor, ctx: Context, carry: Carry) -> tuple[Tensor, Carry]:
        eta, lam = self.step(ctx, carry.eta), self.decay(ctx)
        return descend(Y, G, eta, lam), Carry(eta, lam, None)


class MomentumRule(Rule):
    """A rule with a momentum `M' = beta M + G` over the loops."""

    def __init__(self, step: Step, decay: Decay, *, beta: float = 0.5):
        super().__init__(step, decay)
        if not 0 <= beta < 1:
            raise ValueError(f"beta, the momentum over loops, must lie in [0, 1), got {beta}")
        self.beta = beta
        self.where = f"β = {beta:g}"

    def init(self, Y: Tensor) -> Carry:
        return super().init(Y)._replace(memory=0 * wide(Y))

    def forward(self, Y: Tensor, G: Tensor, ctx: Context, carry: Carry) -> tuple[Tensor, Carry]:
        # None where the loop before had a rule without memory.
        M = wide(G) if carry.memory is None else self.beta * carry.memory + wide(G)
        eta, lam = self.step(ctx, carry.eta), self.decay(ctx)
        return descend(Y, self.direction(G, M), eta, lam), Carry(eta, lam, M)

    @abstractmethod
    def direction(self, G: Float[Tensor, "B T r d"], M: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T r d"]:
        """The direction descended, from the gradient and the new momentum."""


@final
class HeavyBall(MomentumRule):
    """`M' = beta M + G`, `Y' = (I - eta Lam) Y - eta M'` (Polyak, 1964).

    `beta` is 0.5 by default: a loop of three steps sees little of a longer memory.

    >>> from looptim.loop.controls import ConstantDecay, ConstantStep
    >>> HeavyBall(ConstantStep(), ConstantDecay(0.0)).direction(torch.tensor(1.0), torch.tensor(1.5))
    tensor(1.5000)
    """

    symbol = "M′ = βM + G, Y′ = (1 − ηλ) Y − η M′"

    def direction(self, G: Tensor, M: Tensor) -> Tensor:
        return M


@final
class Nesterov(MomentumRule):
    """`M' = beta M + G`, `Y' = (I - eta Lam) Y - eta (G + beta M')` (Nesterov, 1983, in Sutskever's form).

    >>> from looptim.loop.controls import ConstantDecay, ConstantStep
    >>> Nesterov(ConstantStep(), ConstantDecay(0.0)).direction(torch.tensor(1.0), torch.tensor(1.5))
    tensor(1.7500)
    """

    symbol = "M′ = βM + G, Y′ = (1 − ηλ) Y − η (G + βM′)"

    def direction(self, G: Tensor, M: Tensor) -> Tensor:
        return G + self.beta * M


@final
class Muon(MomentumRule):
    """`M' = beta M + G`, `Y' = (I - eta Lam) Y - eta |M'|_F polar(M') / |polar(M')|_F` (after Jordan et al., 2024).

    The momentum of one token is an r x d matrix; its polar factor has the same row and column spaces with all singular
    values equal, so that no stream direction is starved. It is given back the size of the momentum, since the size of a
    block's correction carries information here. For a matrix of rank one (the first step) this is heavy-ball itself.

    >>> from looptim.loop.controls import ConstantDecay, ConstantStep
    >>> M = torch.diag(torch.tensor([3.0, 4.0])).reshape(1, 1, 2, 2)
    >>> Muon(ConstantStep(), ConstantDecay(0.0)).direction(M, M).diagonal(dim1=-2, dim2=-1).round(decimals=1)
    tensor([[[3.5000, 3.5000]]])
    """

    symbol = "M′ = βM + G, Y′ = (1 − ηλ) Y − η ‖M′‖ polar(M′)/‖polar(M′)‖"

    def direction(self, G: Tensor, M: Tensor) -> Tensor:
        with full_precision(M):
            P = polar(M)
            return P * (_norm(M) / _norm(P).clamp_min(1e-12))


def _norm(Y: Tensor) -> Tensor:
    """The Frobenius norm of each token's matrix."""
    return torch.linalg.vector_norm(Y, dim=(-2, -1), keepdim=True)


@final
class Hyperball(Rule):
    """`Y' = |Y| V / |V|`, `V = Y - eta |Y| G / |G|`: the state keeps its norm (after Wen et al., 2026).

    A step turns the state by at most arcsin(eta), and by arctan(eta) where the gradient is orthogonal to it; a decay
    would only rescale what is normalised away, so there is none.

    >>> from looptim.loop.controls import ConstantStep
    >>> rule, Y = Hyperball(ConstantStep()), torch.tensor([[[[3.0, 4.0]]]])
    >>> rule(Y, torch.randn(1, 1, 1, 2), Context(Y, None, None), rule.init(Y))[0].norm().round(decimals=4)
    tensor(5.)
    """

    symbol = "Y′ = ‖Y‖ V/‖V‖, V = Y − η ‖Y‖ G/‖G‖"

    def __init__(self, step: Step):
        super().__init__(step, ConstantDecay(0.0))

    def forward(self, Y: Tensor, G: Tensor, ctx: Context, carry: Carry) -> tuple[Tensor, Carry]:
        eta = self.step(ctx, carry.eta)
        radius = _norm(wide(Y))
        V = wide(Y) - eta * radius * wide(G) / _norm(wide(G)).clamp_min(1e-12)
        return (radius * V / _norm(V).clamp_min(1e-12)).to(Y.dtype), Carry(eta, 0.0, None)
