"""What every part of a transition shares: a symbol, the context it may read, and the gate it may be built on."""

from __future__ import annotations

import inspect
import math
import sys
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.numerics import FLOOR, full_precision, wide

if TYPE_CHECKING:
    from jaxtyping import Float

    from .maps import Map
    from .rules import Carry


class Context(NamedTuple):
    """What a part may look at during one step."""

    Y: Tensor
    """The state, (B, T, r, d)."""
    Z: Tensor | None
    """Features of the state that all controllers share, (B, T, r d), in fp32 or wider; None if no part uses them."""
    e: Tensor
    """The prelude output, (B, T, d)."""


class Record(NamedTuple):
    """Everything that one step computed, for whoever wants to look inside."""

    ctx: Context
    H: Map
    """The map the state was read with."""
    x: Map
    """The map the error was written with; the same object where the transition is aligned."""
    b: Tensor | None
    o: Tensor
    t: Tensor
    g: Tensor
    Y: Tensor
    """The next state."""
    carry: Carry


class Part(nn.Module):
    """A module that is one part of a transition and can describe itself.

    `symbol` is the part's cell in the paper's table; `where` defines the letters in it.
    """

    symbol: str = "?"
    where: str = ""


def symbol(part: object) -> str:
    """A part's symbol; a user's part without one goes by the name of its class."""
    given = getattr(part, "symbol", "?")
    return type(part).__name__ if given == "?" else given


def require(what: str, value: object, kind: type) -> None:
    """Raise a ValueError unless `value` is of the required kind."""
    if not isinstance(value, kind):
        given = value.__name__ + " itself, not an instance of it" if isinstance(value, type) else type(value).__name__
        raise ValueError(f"{what} must be a looptim {kind.__name__}, got {given}")


def check_same_shape(got: Tensor, wanted: Tensor, what: str, like: str) -> None:
    if not isinstance(got, Tensor):
        raise ValueError(f"{what} gave a {type(got).__name__}, not a tensor of the shape of {like}")
    if got.shape != wanted.shape:
        raise ValueError(
            f"{what} gave a tensor of shape {tuple(got.shape)}, but {like} is {tuple(wanted.shape)}; they must agree"
        )


def rms_features(Y: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T rd"]:
    """`Z = RMSNorm(flatten(Y))`, without a gain (the controllers' weights absorb one), eps 1e-20 as released.

    A state whose root mean square is below `FLOOR` is divided by `FLOOR` instead, since the derivative there would be
    1e10.

    >>> rms_features(torch.tensor([[[[3.0], [-4.0]]]])).pow(2).mean().item()
    1.0
    """
    Z = wide(Y.flatten(-2))
    share = torch.linalg.vector_norm(Z, dim=-1, keepdim=True) / (FLOOR * math.sqrt(Z.shape[-1]))
    return F.rms_norm(Z, Z.shape[-1:], eps=1e-20) * share.clamp_max(1)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a user's function; its annotations may name things that only a type checker imports."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def logit(p: float, name: str) -> float:
    """The bias at which a sigmoid starts at `p`, which is the value of the option `name`."""
    if not 0 < p < 1:
        raise ValueError(f"{name} is the initial value of a sigmoid and must lie strictly between 0 and 1, got {p}")
    return math.log(p / (1 - p))


@final
class Gate(nn.Module):
    """`gain * sigmoid(a * (W z) + b)`, the bounded controller of HyperLoop and OperLoop (Section 4).

    `W ~ U(-1/sqrt(n), 1/sqrt(n))` for n inputs, `a` starts at `scale` for every output and `b` at `bias`:
    a small `scale` makes the gate start at `gain * sigmoid(bias)`, nearly the same for every token.

    >>> Gate(8, 2, bias=0.0, gain=2.0)(torch.zeros(1, 8))
    tensor([[1., 1.]], grad_fn=<MulBackward0>)
    """

    init_scale: ClassVar[float] = 0.01

    def __init__(self, inputs: int, outputs: int, *, bias: float, scale: float = init_scale, gain: float = 1.0):
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.W = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.a = nn.Parameter(torch.full((outputs,), float(scale)))
        self.b = nn.Parameter(torch.full((outputs,), float(bias)))
        self.gain = gain

    def forward(self, z: Float[Tensor, "*batch inputs"] | None) -> Float[Tensor, "*batch outputs"]:
        if z is None:
            raise ValueError("a gate looks at the features of the state, but its Transition has features=None")
        if z.shape[-1] != self.W.shape[1]:
            raise ValueError(
                f"a gate built for {self.W.shape[1]} features got {z.shape[-1]}; "
                "it needs the width times the number of streams of the state"
            )
        with full_precision(z):
            z = wide(z)
            logits = self.a.to(z.dtype) * F.linear(z, self.W.to(z.dtype)) + self.b.to(z.dtype)
            return self.gain * torch.sigmoid(logits)


class ByGate(Part):
    """A part that looks at the state through one gate and nothing else: `forward(ctx, ...) = use(gate(ctx.Z), ...)`.

    A fused transition computes the gates of all such parts together.
    """

    gate: Gate

    @abstractmethod
    def use(self, value: Float[Tensor, "B T outputs"], *others: Any) -> Any:
        """The part's result for a given value of its gate."""

    def forward(self, ctx: Context, *others: Any) -> Any:
        return self.use(self.gate(ctx.Z), *others)
