"""Step sizes `eta` and decays `lam`: parts that compute a number, a diagonal or a small matrix from the state.

Both broadcast against the state (B, T, r, d): a Python float for a constant, (B, T, 1, 1) for one number per token,
(B, T, r, 1) for a diagonal over the streams, (B, T, 1, d) for one over the channels. A decay may also be a full
`StreamMatrix`. All are computed in fp32 or wider.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.numerics import floored_norm, full_precision, wide
from .base import ByGate, Context, Gate, Part
from .maps import vector

if TYPE_CHECKING:
    from jaxtyping import Float


class StreamMatrix(NamedTuple):
    """A decay `Lam` that is a full matrix over the streams, (B, T, r, r) or (r, r), as Proposition 1 allows."""

    matrix: Tensor


class Step(Part):
    """Computes `eta_l`, given `eta_{l-1}`."""

    @abstractmethod
    def forward(self, ctx: Context, previous: float | Tensor) -> float | Tensor:
        """The step size at this state."""


class Decay(Part):
    """Computes `lam_l`, the weight decay of the state."""

    @abstractmethod
    def forward(self, ctx: Context) -> float | Tensor | StreamMatrix:
        """The decay at this state."""


@final
class ConstantStep(Step):
    """`eta = value`; 1 for every published transition without a step size.

    >>> ConstantStep()(None, 0.5)
    1.0
    """

    def __init__(self, value: float = 1.0):
        super().__init__()
        self.value = float(value)
        self.symbol = f"{value:g}"

    def forward(self, ctx: Context, previous: float | Tensor) -> float:
        return self.value


@final
class SigmoidStep(ByGate, Step):
    """`eta_l = sigmoid(a (W Z) + b)`, one number per token: OperLoop's non-causal ablation (Table 6).

    >>> SigmoidStep(8, bias=0.0)(Context(None, torch.zeros(1, 1, 8), None), 1.0).shape
    torch.Size([1, 1, 1, 1])
    """

    symbol = "σ(·)"
    where = "σ(·) = σ(a·(W Z) + b)"

    def __init__(self, features: int, *, bias: float, scale: float = Gate.init_scale):
        super().__init__()
        self.gate = Gate(features, 1, bias=bias, scale=scale)

    def use(self, value: Tensor, previous: float | Tensor) -> Float[Tensor, "B T 1 1"]:
        return value.unsqueeze(-1)


@final
class CausalStep(ByGate, Step):
    """`eta_l = sigmoid(a (W Z) + b) eta_{l-1}`, `eta_{-1} = 1` (Eq. 13): decreases from loop to loop.

    >>> CausalStep(8, bias=0.0)(Context(None, torch.zeros(1, 1, 8), None), torch.full((1, 1, 1, 1), 0.5)).item()
    0.25
    """

    symbol = "η_l"
    where = "η_l = η_{l−1} σ(a·(W Z) + b), η_{−1} = 1"

    def __init__(self, features: int, *, bias: float, scale: float = Gate.init_scale):
        super().__init__()
        self.gate = Gate(features, 1, bias=bias, scale=scale)

    def use(self, value: Tensor, previous: float | Tensor) -> Float[Tensor, "B T 1 1"]:
        return value.unsqueeze(-1) * previous


@final
class GatedStep(Step):
    """`eta = 1 - g`, `g = sigmoid(W [y, e] + b)`, one number per channel: RecurrentGPT's row of Table 7.

    No code is public: `W` starts at zero and `b` at `bias`, where 0 keeps half of the state.

    >>> GatedStep(4)(Context(torch.ones(1, 1, 1, 4), None, torch.ones(1, 1, 4)), 1.0).flatten().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """

    symbol = "1 − g"
    where = "g = σ(W [y, e] + b)"

    def __init__(self, width: int, *, bias: float = 0.0):
        super().__init__()
        self.W = nn.Parameter(torch.zeros(width, 2 * width))
        self.b = nn.Parameter(torch.full((width,), float(bias)))

    def forward(self, ctx: Context, previous: float | Tensor) -> Float[Tensor, "B T 1 d"]:
        with full_precision(ctx.e):
            z = wide(torch.cat([vector(ctx.Y), ctx.e], dim=-1))
            return torch.sigmoid(-F.linear(z, self.W.to(z.dtype), self.b.to(z.dtype))).unsqueeze(-2)


@final
class NormStep(Step):
    """`eta = alpha |y|`: Recirculation's row of Table 7, released with alpha 0.10.

    >>> NormStep(0.5)(Context(torch.tensor([[[[3.0, 4.0]]]]), None, None), 1.0).item()
    2.5
    """

    symbol = "α‖y‖"

    def __init__(self, alpha: float = 0.10):
        super().__init__()
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha, the share of the target mixed in, must lie in (0, 1], got {alpha}")
        self.alpha = alpha
        self.where = f"α = {alpha:g}"

    def forward(self, ctx: Context, previous: float | Tensor) -> Float[Tensor, "B T 1 1"]:
        return self.alpha * torch.linalg.vector_norm(wide(ctx.Y), dim=(-2, -1), keepdim=True)


@final
class ConstantDecay(Decay):
    """`lam = value`; 1 forgets the state at a unit step, 0 keeps it.

    >>> ConstantDecay()(None)
    1.0
    """

    def __init__(self, value: float = 1.0):
        super().__init__()
        self.value = float(value)
        self.symbol = f"{value:g}"

    def forward(self, ctx: Context) -> float:
        return self.value


@final
class StreamDecay(ByGate, Decay):
    """`Lam = Diag(sigmoid(a (W Z) + b))` (Eq. 14): OperLoop's decay, one number per stream.

    >>> StreamDecay(4, 2, bias=0.0)(Context(None, torch.zeros(1, 1, 8), None)).shape
    torch.Size([1, 1, 2, 1])
    """

    symbol = "Λ"
    where = "Λ = Diag(σ(a·(W Z) + b))"

    def __init__(self, width: int, streams: int, *, bias: float, scale: float = Gate.init_scale):
        super().__init__()
        self.gate = Gate(streams * width, streams, bias=bias, scale=scale)

    def use(self, value: Tensor) -> Float[Tensor, "B T r 1"]:
        return value.unsqueeze(-1)


@final
class ResidualDecay(ByGate, Decay):
    """`Lam = I - H_res`, `H_res = Diag(sigmoid(a (W Z) + b))`: HyperLoop's residual map, seen as a decay.

    >>> ResidualDecay(4, 2, bias=0.0)(Context(None, torch.zeros(1, 1, 8), None)).flatten().tolist()
    [0.5, 0.5]
    """

    symbol = "I − H_res"
    where = "H_res = Diag(σ(a·(W Z) + b))"

    def __init__(self, width: int, streams: int, *, bias: float, scale: float = Gate.init_scale):
        super().__init__()
        self.gate = Gate(streams * width, streams, bias=bias, scale=scale)

    def use(self, value: Tensor) -> Float[Tensor, "B T r 1"]:
        return 1 - value.unsqueeze(-1)


@final
class InverseNormDecay(Decay):
    """`lam = 1 / |y|`: Recirculation's row of Table 7; with `eta = alpha |y|` it keeps `1 - alpha` of the state.

    >>> InverseNormDecay()(Context(torch.tensor([[[[3.0, 4.0]]]]), None, None)).item()
    0.20000000298023224
    """

    symbol = "1/‖y‖"

    def forward(self, ctx: Context) -> Float[Tensor, "B T 1 1"]:
        return 1 / floored_norm(wide(ctx.Y), dim=(-2, -1))
