"""Input maps: small values without parameters, each with a `read` and its adjoint `write`.

A map takes the state `Y` of shape (B, T, r, d) to a block input `o` of shape (B, T, d), and its
adjoint takes an output error `g` of shape (B, T, d) back to the shape of the state. That the two are
*one object* is the point of the library: a transition that writes through the map it reads with
cannot be written down wrongly by accident.

The defining identity of the pair is `<read(Y), g> = <Y, write(g)>`; `diagnose` tests it by numbers.
Maps over streams and diagonals are computed and applied in fp32 or wider: what is read is rounded once, to the dtype of
the state, and what is written is left unrounded for the rule. A dense matrix multiplies in the dtype of the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


class Map(ABC):
    """A map `H` from the state to the block input, with its adjoint."""

    @abstractmethod
    def read(self, Y: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T d"]:
        """`H Y`."""

    @abstractmethod
    def write(self, g: Float[Tensor, "B T d"]) -> Float[Tensor, "B T r d"]:
        """`H^T g`."""

    def __matmul__(self, inner: Map) -> Map:
        """`A @ B` reads with `B` first, then with `A`; `A` takes the vector that `B` gives."""
        return Composed(self, inner)

    @property
    def causal(self) -> bool:
        """Whether `write` sends nothing to an earlier token; a language model can only use such a map."""
        return True


def vector(Y: Tensor) -> Tensor:
    """A vector state without its stream axis, which must have length 1."""
    if Y.shape[-2] != 1:
        raise ValueError(
            f"this part takes a vector state (r = 1), but the state has {Y.shape[-2]} streams; use one over streams"
        )
    return Y.squeeze(-2)


@final
@dataclass(frozen=True, eq=False)
class Identity(Map):
    """`o = y`.

    >>> Y = torch.randn(2, 3, 1, 4)
    >>> bool((Identity().read(Y) == Y.squeeze(-2)).all())
    True
    """

    def read(self, Y: Float[Tensor, "B T 1 d"]) -> Float[Tensor, "B T d"]:
        return vector(Y)

    def write(self, g: Float[Tensor, "B T d"]) -> Float[Tensor, "B T 1 d"]:
        return g.unsqueeze(-2)


@final
@dataclass(frozen=True, eq=False)
class Diagonal(Map):
    """`o = a * y`, with `a` of shape (d,) or (B, T, d). Its own adjoint.

    >>> Diagonal(torch.tensor([1.0, 2.0])).read(torch.ones(1, 1, 1, 2))
    tensor([[[1., 2.]]])
    """

    a: Tensor

    def read(self, Y: Float[Tensor, "B T 1 d"]) -> Float[Tensor, "B T d"]:
        return (self.a * vector(Y)).to(Y.dtype)

    def write(self, g: Float[Tensor, "B T d"]) -> Float[Tensor, "B T 1 d"]:
        return (self.a * g).unsqueeze(-2)


@final
@dataclass(frozen=True, eq=False)
class Dense(Map):
    """`o = W y`, with `W` of shape (d, d); the adjoint multiplies by its transpose.

    >>> Dense(torch.tensor([[0.0, 1.0], [0.0, 0.0]])).write(torch.tensor([[[1.0, 5.0]]]))
    tensor([[[[0., 1.]]]])
    """

    W: Tensor

    def read(self, Y: Float[Tensor, "B T 1 d"]) -> Float[Tensor, "B T d"]:
        self._check(Y.shape[-1], self.W.shape[1], "reads")
        # Autocast would cast the state to bf16.
        return F.linear(vector(Y), self.W.to(Y.dtype)).to(Y.dtype)

    def write(self, g: Float[Tensor, "B T d"]) -> Float[Tensor, "B T 1 d"]:
        self._check(g.shape[-1], self.W.shape[0], "writes")
        return (g @ self.W.to(g.dtype)).to(g.dtype).unsqueeze(-2)

    def _check(self, width: int, wanted: int, does: str) -> None:
        if width != wanted:
            raise ValueError(f"a Dense map of shape {tuple(self.W.shape)} {does} a width of {wanted}, got {width}")


@final
@dataclass(frozen=True, eq=False)
class Streams(Map):
    """`o = h Y`, a row vector `h` of shape (B, T, r) over the streams; the adjoint is an outer product.

    >>> Streams(torch.tensor([[[1.0, 3.0]]])).write(torch.tensor([[[2.0]]]))
    tensor([[[[2.],
              [6.]]]])
    """

    h: Tensor

    def read(self, Y: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T d"]:
        if self.h.shape[-1] != Y.shape[-2]:
            raise ValueError(f"this map reads {self.h.shape[-1]} streams, but the state has {Y.shape[-2]}")
        return (self.h.unsqueeze(-1) * Y).sum(-2).to(Y.dtype)

    def write(self, g: Float[Tensor, "B T d"]) -> Float[Tensor, "B T r d"]:
        return self.h.unsqueeze(-1) * g.unsqueeze(-2)


@final
@dataclass(frozen=True, eq=False)
class Shift(Map):
    """`o_i = y_{i-1}`: token i reads the state of the token before it, the first one reads zero.

    Its adjoint writes to the token *before*, so a causal model can read through it but never write
    through it: a transition with a token shift cannot be aligned.

    >>> Shift().read(torch.tensor([[[[1.0]], [[2.0]]]])).flatten()
    tensor([0., 1.])
    """

    def read(self, Y: Float[Tensor, "B T 1 d"]) -> Float[Tensor, "B T d"]:
        return F.pad(vector(Y)[:, :-1], (0, 0, 1, 0))

    def write(self, g: Float[Tensor, "B T d"]) -> Float[Tensor, "B T 1 d"]:
        return F.pad(g[:, 1:], (0, 0, 0, 1)).unsqueeze(-2)

    @property
    def causal(self) -> bool:
        return False


@final
@dataclass(frozen=True, eq=False)
class Composed(Map):
    """`o = outer (inner Y)`; the adjoint runs backwards. `outer` acts on a vector state.

    >>> twice = Composed(Diagonal(torch.tensor([2.0])), Streams(torch.ones(1, 1, 3)))
    >>> twice.read(torch.ones(1, 1, 3, 1)).item()
    6.0
    """

    outer: Map
    inner: Map

    def read(self, Y: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T d"]:
        return self.outer.read(self.inner.read(Y).unsqueeze(-2))

    def write(self, g: Float[Tensor, "B T d"]) -> Float[Tensor, "B T r d"]:
        return self.inner.write(self.outer.write(g).squeeze(-2).to(g.dtype))

    @property
    def causal(self) -> bool:
        return self.outer.causal and self.inner.causal


@final
@dataclass(frozen=True, eq=False)
class Pullback(Map):
    """A nonlinear projection `o = fn(Y)`; its adjoint at the point `Y` is the VJP `J(Y)^T g`.

    This is the chain rule of Eq. 10 with a nonlinear projection: `dL/dY = J^T f'(o)`. `fn` must act on each token
    separately, or at least write to no earlier token.

    >>> Y = torch.full((1, 1, 1, 1), 3.0)
    >>> square = Pullback(lambda Y: Y.squeeze(-2) ** 2, Y)
    >>> square.read(Y).item(), square.write(torch.ones(1, 1, 1)).item()
    (9.0, 6.0)
    """

    fn: Callable[[Tensor], Tensor]
    Y: Tensor

    def read(self, Y: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T d"]:
        return self.fn(Y)

    def write(self, g: Float[Tensor, "B T d"]) -> Float[Tensor, "B T r d"]:
        o, vjp = torch.func.vjp(self.fn, self.Y)[:2]
        return vjp(g.to(o.dtype))[0]
