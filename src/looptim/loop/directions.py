"""Directions: transforms of the gradient before the step. They chain as optax's transforms do.

`rules.Descent(step, decay, Momentum(0.5), Polar())` passes the gradient through `Momentum`, then through `Polar`, and
steps along the result. A direction may remember any tree of tensors whose first axes are (B, T).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ..base.numerics import floored_norm, full_precision, polar, wide
from .base import Part

if TYPE_CHECKING:
    from jaxtyping import Float


class Direction(Part):
    """A transform of the gradient. `symbol` is its result for a given `{G}`, `memory_symbol` what it remembers."""

    memory_symbol: str = ""

    def init(self, Y: Float[Tensor, "B T r d"]) -> Any:
        """The memory before the first loop; None if the direction has none."""
        return None

    @abstractmethod
    def forward(self, G: Float[Tensor, "B T r d"], memory: Any) -> tuple[Float[Tensor, "B T r d"], Any]:
        """The direction for a gradient, and the new memory."""


class MomentumDirection(Direction):
    """Remembers `M' = beta M + G`. `beta` is 0.5 by default, since a loop of three steps is too short for more."""

    memory_symbol = "M′ = βM + {G}"

    def __init__(self, beta: float = 0.5):
        super().__init__()
        if not 0 <= beta < 1:
            raise ValueError(f"beta, the momentum over loops, must lie in [0, 1), got {beta}")
        self.beta = beta
        self.where = f"β = {beta:g}"

    def init(self, Y: Tensor) -> Tensor:
        return 0 * wide(Y)


@final
class Momentum(MomentumDirection):
    """`D = M'`, `M' = beta M + G`: heavy ball (Polyak, 1964).

    >>> Momentum(0.5)(torch.tensor(1.0), torch.tensor(1.0))[0]
    tensor(1.5000)
    """

    symbol = "M′"

    def forward(self, G: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        M = self.beta * memory + wide(G)
        return M, M


@final
class Nesterov(MomentumDirection):
    """`D = G + beta M'`, `M' = beta M + G` (Nesterov, 1983, in Sutskever's form).

    >>> Nesterov(0.5)(torch.tensor(1.0), torch.tensor(1.0))[0]
    tensor(1.7500)
    """

    symbol = "({G} + βM′)"

    def forward(self, G: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        M = self.beta * memory + wide(G)
        return G + self.beta * M, M


@final
class Polar(Direction):
    """`D = |G|_F polar(G) / |polar(G)|_F`, the polar factor at the size of its input (after Jordan et al., 2024).

    What a token is given is an r x d matrix; its polar factor has the same row and column spaces with all singular
    values equal, so that no stream direction is starved. It gets its size back, since the size of a block's correction
    carries information here. A matrix of rank one stays as it is.

    >>> M = torch.diag(torch.tensor([3.0, 4.0])).reshape(1, 1, 2, 2)
    >>> Polar()(M, None)[0].diagonal(dim1=-2, dim2=-1).round(decimals=1)
    tensor([[[3.5000, 3.5000]]])
    """

    symbol = "‖{G}‖ polar({G})/‖polar({G})‖"

    def forward(self, G: Tensor, memory: None) -> tuple[Tensor, None]:
        with full_precision(G):
            P = polar(G)
            return P * (frobenius_norm(G) / floored_norm(P, dim=(-2, -1))), None


@final
class Adam(Direction):
    """`D = m^ / sqrt(v^ + eps^2)` with `m' = b1 m + (1 - b1) G`, `v' = b2 v + (1 - b2) G^2` (Kingma and Ba, 2015).

    `m^ = m' / (1 - b1^n)` and `v^ = v' / (1 - b2^n)` after n loops of a token. `eps` stands inside the root, where a
    zero gradient has a derivative, and is large beside that of an optimizer: training passes through the division.

    >>> Adam(eps=1e-8)(torch.tensor([[[[3.0, -4.0]]]]), Adam().init(torch.zeros(1, 1, 1, 2)))[0].sign()
    tensor([[[[ 1., -1.]]]])
    """

    symbol = "m̂/√(v̂ + ε²)"
    memory_symbol = "m′ = β₁m + (1 − β₁) {G}, v′ = β₂v + (1 − β₂) {G}²"

    def __init__(self, betas: tuple[float, float] = (0.5, 0.9), eps: float = 1e-3):
        super().__init__()
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas, the averages over loops, must lie in [0, 1), got {betas}")
        if eps <= 0:
            raise ValueError(f"eps must be positive, got {eps}")
        self.betas, self.eps = betas, eps
        self.where = f"β₁, β₂ = {betas[0]:g}, {betas[1]:g}, ε = {eps:g}, m̂ and v̂ without the bias of their start"

    def init(self, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nothing = 0 * wide(Y)
        # Loops are counted per token, since a token may start later or leave earlier than its neighbors.
        return nothing, nothing, nothing[..., :1, :1]

    def forward(self, G: Tensor, memory: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        (m, v, n), G, (first, second) = memory, wide(G), self.betas
        m, v, n = first * m + (1 - first) * G, second * v + (1 - second) * G.square(), n + 1
        D = (m / (1 - first**n)) / torch.sqrt(v / (1 - second**n) + self.eps**2)
        return D, (m, v, n)


def frobenius_norm(Y: Tensor) -> Tensor:
    """The norm of each token's matrix."""
    return torch.linalg.vector_norm(Y, dim=(-2, -1), keepdim=True)
