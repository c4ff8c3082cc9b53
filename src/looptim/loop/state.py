"""How the state starts from the prelude output `e`, and how it ends as the coda's input."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from ..base.choices import choose
from ..base.numerics import rms_norm, wide
from .base import Part

if TYPE_CHECKING:
    from jaxtyping import Float


@final
class Copies(Part):
    """`Y_0 = Duplicate_r(e)`, r copies of the prelude output (Algorithm 1, line 3); r = 1 is `y_0 = e`.

    >>> Copies(4)(torch.ones(1, 2, 8)).shape
    torch.Size([1, 2, 4, 8])
    """

    def __init__(self, streams: int = 1):
        super().__init__()
        if streams < 1:
            raise ValueError(f"streams must be at least 1, got {streams}")
        self.streams = streams
        self.symbol = "e" if streams == 1 else f"{streams} copies of e"

    def forward(self, e: Float[Tensor, "B T d"]) -> Float[Tensor, "B T r d"]:
        # The copies are made contiguous, so every step sees the same strides and one compilation serves all of them.
        return e.unsqueeze(-2).expand(-1, -1, self.streams, -1).contiguous()


@final
class Noise(Part):
    """`y_0 ~ N(0, std^2)`, truncated at three sigma (Huginn and Parcae as released).

    In training every token draws its own start from torch's global generator. In eval mode all tokens share one draw,
    made from `seed` when the part is built and kept as a buffer, so two forward passes agree, and a token's start does
    not depend on its position, padding, chunking or a KV cache.

    >>> start = Noise(8, std=0.5).eval()
    >>> bool((start(torch.ones(1, 2, 8)) == start(torch.zeros(1, 2, 8))).all())
    True
    """

    def __init__(self, width: int, *, std: float, seed: int = 0):
        super().__init__()
        if std < 0:
            raise ValueError(f"std must not be negative, got {std}")
        self.std = std
        self.symbol = f"N(0, {std:.3g}²)"
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(width, generator=generator, dtype=torch.float64, device="cpu")
        self.register_buffer("fixed", (std * _truncated_normal(uniform)).to(torch.get_default_dtype()))
        self.fixed: Tensor

    def forward(self, e: Float[Tensor, "B T d"]) -> Float[Tensor, "B T 1 d"]:
        # Between 0 and 1, bf16 has too few numbers to draw from.
        y = self.std * _truncated_normal(torch.rand_like(wide(e))) if self.training else self.fixed
        # The start is tied to e by a zero, so that the first step sees the same kind of tensor as later ones.
        return (y.to(e) + 0 * e).unsqueeze(-2)


def _truncated_normal(uniform: Tensor, sigmas: float = 3.0) -> Tensor:
    """Inverse-CDF sampling of a standard normal truncated at +-sigmas, written out because it must compile."""
    edge = math.erf(sigmas / math.sqrt(2))
    return math.sqrt(2) * torch.erfinv((2 * uniform - 1) * edge)


@final
class Mean(Part):
    """`h = Mean_r(Y_R)`, the mean over streams (Algorithm 1, line 15); for r = 1 the state itself.

    >>> Mean()(torch.tensor([[[[1.0], [3.0]]]]))
    tensor([[[2.]]])
    """

    symbol = "mean of Y_R"

    def forward(self, Y: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T d"]:
        return Y.squeeze(-2) if Y.shape[-2] == 1 else Y.mean(-2)


@final
class NormedMean(Part):
    """`h = RMSNorm(Mean_r(Y_R))`: Huginn as released normalizes what the loop returns.

    >>> NormedMean(2)(torch.full((1, 1, 1, 2), 7.0)).round(decimals=3).tolist()
    [[[1.0, 1.0]]]
    """

    symbol = "RMSNorm of Y_R"

    def __init__(self, width: int, *, eps: float = 1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, Y: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T d"]:
        return rms_norm(Mean()(Y), self.gain, self.eps)


@final
class Linear(Part):
    """`h = C y_R`, Parcae's read-out; `C` starts as `gain` (released: sqrt(2/5)) times an orthogonal matrix, or I.

    >>> Linear(2, gain=2.0, start="identity")(torch.tensor([[[[3.0, 4.0]]]])).tolist()
    [[[6.0, 8.0]]]
    """

    symbol = "C y_R"

    def __init__(self, width: int, *, gain: float = math.sqrt(2 / 5), start: str = "orthogonal"):
        super().__init__()
        starts = {"orthogonal": lambda: nn.init.orthogonal_(torch.empty(width, width), gain)}
        starts["identity"] = lambda: gain * torch.eye(width)
        self.C = nn.Parameter(choose("readout", start, starts)())

    def forward(self, Y: Float[Tensor, "B T 1 d"]) -> Float[Tensor, "B T d"]:
        return nn.functional.linear(Y.squeeze(-2), self.C.to(Y.dtype)).to(Y.dtype)
