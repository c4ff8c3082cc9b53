"""Zero-centered RMS normalization as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..base.numerics import rms_norm

if TYPE_CHECKING:
    from jaxtyping import Float


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last axis, in fp32 or wider.

    y = x / sqrt(mean(x^2) + eps) * (1 + gain), gain = 0 at the start.

    >>> RMSNorm(2)(torch.tensor([3.0, -3.0])).round(decimals=3).tolist()
    [1.0, -1.0]
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.zeros(width))

    def forward(self, x: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        return rms_norm(x, self.gain, self.eps)

    def extra_repr(self) -> str:
        return f"{self.gain.numel()}, eps={self.eps}"
