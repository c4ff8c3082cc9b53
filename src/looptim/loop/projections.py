"""Projections `o = H Y + b`: parts that compute the input map `H` and the bias `b` from the state."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.numerics import full_precision, rms_norm, wide
from .base import ByGate, Context, Gate, Part
from .maps import Composed, Dense, Diagonal, Identity, Map, Pullback, Shift, Streams

if TYPE_CHECKING:
    from jaxtyping import Float


class Projection(Part):
    """Computes `(H, b)` from the state; `b` is None if there is no bias. `map_symbol` is the letter of `H` alone."""

    map_symbol: str = "H"
    mixes_tokens: bool = False
    """Whether a token reads another token's state, which no KV cache holds, so decoding runs without a cache."""

    @abstractmethod
    def forward(self, ctx: Context) -> tuple[Map, Float[Tensor, "B T d"] | None]:
        """The input map and the bias."""


class MapPart(Part):
    """Computes a map alone, as a separate write map needs."""

    @abstractmethod
    def forward(self, ctx: Context) -> Map:
        """The map at this state."""


@final
class Plain(Projection):
    """`o = y` (Eq. 4 without bias): the vanilla loop.

    >>> H, b = Plain()(Context(torch.ones(1, 1, 1, 2), None, torch.zeros(1, 1, 2)))
    >>> H.read(torch.ones(1, 1, 1, 2)), b
    (tensor([[[1., 1.]]]), None)
    """

    symbol = "y"
    map_symbol = "I"

    def forward(self, ctx: Context) -> tuple[Map, None]:
        return Identity(), None


@final
class Add(Projection):
    """`o = y + e` (Eq. 4 with `b = e`): Huginn as the paper writes it.

    >>> Add()(Context(torch.ones(1, 1, 1, 2), None, torch.zeros(1, 1, 2)))[1]
    tensor([[[0., 0.]]])
    """

    symbol = "y + e"
    map_symbol = "I"

    def forward(self, ctx: Context) -> tuple[Map, Tensor]:
        return Identity(), ctx.e


@final
class Concat(Projection):
    """`o = W [y + eps, e]`, one matrix on the concatenation: `H = W_y`, `b = W_e e + W_y eps`.

    Huginn as released (no noise) and RecurrentGPT's row of Table 7, where `eps ~ N(0, noise^2)` is drawn in training
    only. No source has an initial value for us: `W` starts at `[state_init I, input_init I]`, the additive injection.

    >>> H, b = Concat(2)(Context(torch.ones(1, 1, 1, 2), None, torch.ones(1, 1, 2)))
    >>> (H.read(torch.ones(1, 1, 1, 2)) + b).tolist()
    [[[2.0, 2.0]]]
    """

    map_symbol = "W_y"

    def __init__(self, width: int, *, noise: float = 0.0, state_init: float = 1.0, input_init: float = 1.0):
        super().__init__()
        if noise < 0:
            raise ValueError(f"noise, the standard deviation of eps, must not be negative, got {noise}")
        self.W = nn.Parameter(torch.cat([state_init * torch.eye(width), input_init * torch.eye(width)], dim=1))
        self.noise = noise
        self.symbol = "W [y + ε, e]" if noise else "W [y, e]"
        self.where = "W = [W_y, W_e]" + (f", ε ~ N(0, {noise:g}²) in training" if noise else "")

    def forward(self, ctx: Context) -> tuple[Map, Tensor]:
        W_y, W_e = self.W.to(ctx.e.dtype).chunk(2, dim=-1)
        b = F.linear(ctx.e, W_e)
        if self.training and self.noise:
            b = b + F.linear(self.noise * torch.randn_like(ctx.e), W_y)
        return Dense(W_y), b


class StateSpace(Projection):
    """`o = Abar y + Bbar e` (Eq. 5) with `Abar = exp(-dt A)`, `dt = softplus(dt_bias)`, `A = exp(A_log)`.

    Parameter names and initial values are those of the released code: `A = 1`, `Abar = sqrt(1/5)`, `B = I`.
    `keep_init` is another `Abar` to start at.
    """

    map_symbol = "Ā"

    def __init__(self, width: int, *, keep_init: float = math.sqrt(0.2)):
        super().__init__()
        if not 0 < keep_init < 1:
            raise ValueError(f"keep_init, the share of the state that is kept, must lie in (0, 1), got {keep_init}")
        dt = -math.log(keep_init)
        self.A_log = nn.Parameter(torch.zeros(width))
        self.dt_bias = nn.Parameter(torch.full((width,), math.log(math.expm1(dt))))
        self.B = nn.Parameter(torch.eye(width))

    @abstractmethod
    def gain(self, dt: Float[Tensor, " d"], A: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """The diagonal in front of `B e`."""

    def forward(self, ctx: Context) -> tuple[Map, Tensor]:
        with full_precision(ctx.e):
            dt = F.softplus(wide(self.dt_bias))
            A = wide(self.A_log).exp()
            a_bar = torch.exp(-dt * A)
            gain = self.gain(dt, A)
        return Diagonal(a_bar), gain.to(ctx.e.dtype) * F.linear(ctx.e, self.B.to(ctx.e.dtype))


@final
class ExactStateSpace(StateSpace):
    """Parcae as the paper writes it: the zero-order-hold gain `Bbar = (1 - exp(-dt A)) / A * B`.

    >>> ExactStateSpace(4).gain(torch.tensor(1.0), torch.tensor(1.0))
    tensor(0.6321)
    """

    symbol = "Ā y + B̄ e"
    where = "Ā = exp(−Δ A), B̄ = (1 − exp(−Δ A))/A · B"

    def gain(self, dt: Tensor, A: Tensor) -> Tensor:
        return -torch.expm1(-dt * A) / A


@final
class EulerStateSpace(StateSpace):
    """Parcae as released: the Euler gain `Bbar = dt * B`.

    >>> EulerStateSpace(4).gain(torch.tensor(0.5), torch.tensor(1.0))
    tensor(0.5000)
    """

    symbol = "Ā y + B̄ e"
    where = "Ā = exp(−Δ A), B̄ = Δ B"

    def gain(self, dt: Tensor, A: Tensor) -> Tensor:
        return dt


@final
class NormedInput(Projection):
    """Wraps another projection and passes it `RMSNorm(e)` instead of `e`: Parcae's `prelude_norm`, as released.

    >>> NormedInput(Add(), 2)(Context(torch.ones(1, 1, 1, 2), None, torch.full((1, 1, 2), 9.0)))[1].round().tolist()
    [[[1.0, 1.0]]]
    """

    def __init__(self, projection: Projection, width: int, *, eps: float = 1e-5):
        super().__init__()
        self.projection = projection
        self.gain = nn.Parameter(torch.zeros(width))
        self.eps = eps
        self.symbol = projection.symbol.replace(" e", " norm(e)")
        self.map_symbol = projection.map_symbol
        self.where = projection.where

    def forward(self, ctx: Context) -> tuple[Map, Tensor | None]:
        return self.projection(ctx._replace(e=rms_norm(ctx.e, self.gain, self.eps)))


@final
class Gated(Projection):
    """`o = sigmoid(W_g e) * (W_u y)`: Full-Bandwidth's row of Table 7, `H = Diag(sigmoid(W_g e)) W_u`.

    No code is public. `W_g` starts at zero (every gate at one half) and `W_u` at `2 read_init I`, so that the first
    read is `read_init` times the state; with 1 the loop starts as the vanilla one.

    >>> H, _ = Gated(2)(Context(torch.ones(1, 1, 1, 2), None, torch.ones(1, 1, 2)))
    >>> H.read(torch.ones(1, 1, 1, 2)).tolist()
    [[[1.0, 1.0]]]
    """

    symbol = "σ(W_g e) ⊙ W_u y"
    map_symbol = "Diag(σ(W_g e)) W_u"

    def __init__(self, width: int, *, read_init: float = 1.0):
        super().__init__()
        self.W_g = nn.Parameter(torch.zeros(width, width))
        self.W_u = nn.Parameter(2 * read_init * torch.eye(width))

    def forward(self, ctx: Context) -> tuple[Map, None]:
        with full_precision(ctx.e):
            e = wide(ctx.e)
            gate = torch.sigmoid(F.linear(e, self.W_g.to(e.dtype)))
        # The composition is written out because a compiler cannot trace the @ operator of our classes.
        return Composed(Diagonal(gate), Dense(self.W_u)), None


@final
class Shifted(Projection):
    """Another projection, applied to the state of the token before: `o_i = H y_{i-1} + b` (the star of Table 7).

    >>> Shifted(Plain()).symbol
    'y_{i−1}'
    """

    mixes_tokens = True

    def __init__(self, projection: Projection):
        super().__init__()
        self.projection = projection
        self.symbol = projection.symbol.replace("y", "y_{i−1}")
        self.map_symbol = f"{projection.map_symbol} S".removeprefix("I ")
        self.where = ", ".join(filter(None, [projection.where, "S shifts by one token"]))

    def forward(self, ctx: Context) -> tuple[Map, Tensor | None]:
        H, b = self.projection(ctx)
        return Composed(H, Shift()), b


@final
class StreamMap(ByGate, MapPart):
    """A row vector over the streams, `gain * sigmoid(a (W Z) + b)` (Eq. 15): `H_pre`, `H_post` or `H_in`.

    >>> ctx = Context(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 8), torch.zeros(1, 1, 4))
    >>> StreamMap(4, 2, name="H_post", bias=0.0, gain=2.0)(ctx).h
    tensor([[[1., 1.]]], grad_fn=<MulBackward0>)
    """

    def __init__(
        self, width: int, streams: int, *, name: str, bias: float, scale: float = Gate.init_scale, gain: float = 1.0
    ):
        super().__init__()
        self.gate = Gate(streams * width, streams, bias=bias, scale=scale, gain=gain)
        self.symbol = name
        self.where = f"{name} = {'' if gain == 1 else f'{gain:g} '}σ(a·(W Z) + b)"

    def use(self, value: Tensor) -> Streams:
        return Streams(value)


@final
class StreamRead(Projection):
    """`o = H Y` through a `StreamMap`: the projection of HyperLoop (Eq. 6) and OperLoop (Section 4).

    >>> StreamRead(StreamMap(4, 2, name="H_in", bias=0.0)).symbol
    'H_in Y'
    """

    def __init__(self, map: StreamMap):
        super().__init__()
        self.map = map
        self.symbol, self.map_symbol, self.where = f"{map.symbol} Y", map.symbol, map.where

    def forward(self, ctx: Context) -> tuple[Map, None]:
        return self.map(ctx), None


@final
class BoundedRead(Projection):
    """`o = c tanh(H Y / c)`, a nonlinear projection: no coordinate the blocks see exceeds `c`.

    Its adjoint is the pullback `H^T Diag(1 - tanh^2(H Y / c)) g`, never larger than the linear one, so a saturated
    coordinate is no longer written to. `c` is learned, one per channel.

    >>> BoundedRead(StreamMap(4, 2, name="H_in", bias=0.0), 4).symbol
    'c tanh(H_in Y / c)'
    """

    def __init__(self, map: StreamMap, width: int, *, bound: float = 4.0):
        super().__init__()
        if bound <= 0:
            raise ValueError(f"bound must be positive, got {bound}")
        self.map = map
        self.log_c = nn.Parameter(torch.full((width,), math.log(bound)))
        self.symbol, self.map_symbol = f"c tanh({map.symbol} Y / c)", "J"
        self.where = f"{map.where}, J = ∂o/∂Y"

    def forward(self, ctx: Context) -> tuple[Map, None]:
        H = self.map(ctx)
        c = wide(self.log_c).exp()
        return Pullback(lambda Y: (c * torch.tanh(H.read(wide(Y)) / c)).to(Y.dtype), wide(ctx.Y)), None
