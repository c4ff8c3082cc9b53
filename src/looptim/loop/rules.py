"""Update rules: how the gradient of the local objective moves the state.

Every rule has a `step` and a `decay` and may keep a memory across loops. `rule.init(Y_0)` makes what is carried,
`rule(Y, G, ctx, carry)` gives the next state and the next carry. A rule sees the written gradient `G = x^T f'(o)` only:
it does not know which projection or objective it came from.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..base.numerics import floored_norm, full_precision, wide
from .base import Context, Part, require
from .controls import ConstantDecay, Decay, Step, StreamMatrix
from .directions import Direction, Momentum, Polar, frobenius_norm
from .directions import Nesterov as NesterovDirection

if TYPE_CHECKING:
    from jaxtyping import Float


class Carry(NamedTuple):
    """What a rule hands from one step to the next."""

    eta: float | Tensor
    """The step size of the last step; 1 before the first step."""
    lam: float | Tensor | StreamMatrix
    """The decay of the last step."""
    memory: Any
    """The rule's memory, any tree of tensors whose first axes are (B, T), or None."""


class Rule(Part):
    """An update rule for the state. `symbol` is its equation, with `G = x^T f'(o)`."""

    name: str = ""
    """The rule's name in the zoo; a user's rule without one goes by the name of its class."""

    def __init__(self, step: Step, decay: Decay):
        super().__init__()
        require("step", step, Step)
        require("decay", decay, Decay)
        self.step = step
        self.decay = decay

    def init(self, Y: Float[Tensor, "B T r d"]) -> Carry:
        """`eta_{-1} = 1` and no memory."""
        return Carry(eta=torch.ones_like(wide(Y[..., :1, :1])), lam=0.0, memory=None)

    @abstractmethod
    def forward(
        self, Y: Float[Tensor, "B T r d"], G: Float[Tensor, "B T r d"], ctx: Context, carry: Carry
    ) -> tuple[Float[Tensor, "B T r d"], Carry]:
        """The next state and the next carry."""


class Retraction(Part):
    """The final step of a rule that keeps the state on a set; replaces `descend`. `symbol` is written with `{G}`."""

    @abstractmethod
    def forward(
        self, Y: Float[Tensor, "B T r d"], D: Float[Tensor, "B T r d"], eta: float | Tensor, lam: Any
    ) -> Float[Tensor, "B T r d"]:
        """The next state, for the direction `D`."""


NEAR = 1 / 16
"""How near to zero, as a share of its norm, a step may lead before the state is no longer put back on its sphere."""


@final
class Sphere(Retraction):
    """`Y' = |Y| V / |V|`, `V = (I - eta Lam) Y - eta |Y| D / |D|`: the state keeps its norm (after Wen et al., 2026).

    The divisor of `V` is at least `NEAR |Y|`.

    >>> import torch
    >>> Y = torch.tensor([[[[3.0, 4.0]]]])
    >>> Sphere()(Y, torch.randn(1, 1, 1, 2), 0.5, 0.0).norm().round(decimals=4)
    tensor(5.)
    """

    symbol = "Y′ = ‖Y‖ V/‖V‖, V = Y − η ‖Y‖ {G}/‖{G}‖"

    def forward(self, Y: Tensor, D: Tensor, eta: float | Tensor, lam: Any) -> Tensor:
        D, radius = wide(D), frobenius_norm(wide(Y))
        V = keep(wide(Y), eta, lam) - eta * radius * D / floored_norm(D, dim=(-2, -1))
        # A full step against the state itself leaves nothing that has a direction; then the state shrinks.
        size = torch.maximum(floored_norm(V, dim=(-2, -1)), NEAR * radius)
        return (radius * V / size).to(Y.dtype)


def keep(Y: Tensor, eta: float | Tensor, lam: float | Tensor | StreamMatrix) -> Tensor:
    """`(I - eta Lam) Y`, what the decay leaves of the state."""
    if isinstance(lam, StreamMatrix):
        with full_precision(Y):
            return Y - eta * (lam.matrix @ Y.to(lam.matrix.dtype))
    return (1 - eta * lam) * Y


def descend(Y: Tensor, direction: Tensor, eta: float | Tensor, lam: float | Tensor | StreamMatrix) -> Tensor:
    """`(I - eta Lam) Y - eta direction` (Eq. 8).

    >>> import torch
    >>> descend(torch.tensor(4.0), torch.tensor(1.0), 0.5, 0.5)
    tensor(2.5000)
    """
    if isinstance(eta, float) and isinstance(lam, float) and eta * lam == 1.0:
        return (-eta * direction).to(Y.dtype)
    # eta, lam and the written gradient are in fp32 or wider, so a bf16 state is rounded here and nowhere else.
    return (keep(Y, eta, lam) - eta * direction).to(Y.dtype)


@final
class Descent(Rule):
    """`Y' = (I - eta Lam) Y - eta D`, where `D` is what a chain of directions makes of the gradient `G` (Eq. 8).

    Without directions this is gradient descent, Proposition 1, the rule of every row of the paper's tables. A `retract`
    comes last and returns the state to a set, such as a sphere.

    >>> from looptim.loop.controls import ConstantDecay, ConstantStep
    >>> import torch
    >>> rule, Y = Descent(ConstantStep(), ConstantDecay()), torch.ones(1, 1, 1, 2)
    >>> rule(Y, -3 * Y, Context(Y, None, None), rule.init(Y))[0]
    tensor([[[[3., 3.]]]])
    """

    def __init__(
        self, step: Step, decay: Decay, *directions: Direction, retract: Retraction | None = None, name: str = ""
    ):
        super().__init__(step, decay)
        for direction in directions:
            require("a direction", direction, Direction)
        if retract is not None:
            require("retract", retract, Retraction)
        self.directions = nn.ModuleList(directions)
        self.retract = retract
        parts = [*directions, *([] if retract is None else [retract])]
        self.name = name or ", ".join(type(part).__name__.lower() for part in parts) or "gradient descent"
        self.symbol = _equation(directions, retract)
        self.where = ", ".join(filter(None, (part.where for part in parts)))

    def init(self, Y: Tensor) -> Carry:
        memory = tuple(direction.init(Y) for direction in self.directions) or None
        return super().init(Y)._replace(memory=memory)

    def forward(self, Y: Tensor, G: Tensor, ctx: Context, carry: Carry) -> tuple[Tensor, Carry]:
        eta, lam = self.step(ctx, carry.eta), self.decay(ctx)
        check_factor(eta, Y, f"the step {type(self.step).__name__}")
        check_factor(lam, Y, f"the decay {type(self.decay).__name__}")
        return self.move(Y, G, eta, lam, carry)

    def move(self, Y: Tensor, G: Tensor, eta: float | Tensor, lam: Any, carry: Carry) -> tuple[Tensor, Carry]:
        """The next state and the next carry, given a step size and a decay."""
        D, memory = G, []
        for direction, remembered in zip(self.directions, memory_for(self, Y, carry) or (), strict=True):
            D, remembered = direction(D, remembered)
            memory.append(remembered)
        Y_next = (descend if self.retract is None else self.retract)(Y, D, eta, lam)
        return Y_next, Carry(eta, lam, tuple(memory) or None)


def check_factor(value: Any, Y: Tensor, what: str) -> None:
    """Check that a state can be multiplied by what a step or a decay gave."""
    if value is None:
        raise ValueError(f"{what} gave None; it must give a number, or a tensor that multiplies the state (B, T, r, d)")
    sizes = zip(reversed(value.shape), reversed(Y.shape), strict=False) if isinstance(value, Tensor) else ()
    if any(size not in (1, wanted) for size, wanted in sizes):
        raise ValueError(f"{what} gave a tensor of shape {tuple(value.shape)}; it must fit the state {tuple(Y.shape)}")


def memory_for(rule: Rule, Y: Tensor, carry: Carry) -> Any:
    """The memory to continue from: what is carried, or a fresh one after a step of another kind of rule."""
    wanted = form(rule.init(Y[:0]).memory)
    return carry.memory if form(carry.memory) == wanted else rule.init(Y).memory


def form(tree: Any) -> Any:
    """The structure of a tree, where None is not a leaf."""
    return pytree.tree_structure(pytree.tree_map(lambda leaf: () if leaf is None else 0, tree))


def _equation(directions: tuple[Direction, ...], retract: Retraction | None) -> str:
    letter, memories = "G", []
    for direction in directions:
        memories += [direction.memory_symbol.format(G=letter)] if direction.memory_symbol else []
        letter = (type(direction).__name__ if direction.symbol == "?" else direction.symbol).format(G=letter)
    update = "Y′ = (1 − ηλ) Y − η {G}" if retract is None else retract.symbol
    return ", ".join([*memories, update.format(G=letter)])


def GradientDescent(step: Step, decay: Decay) -> Descent:
    """`Y' = (I - eta Lam) Y - eta G`: Proposition 1 (Eq. 8)."""
    return Descent(step, decay)


def HeavyBall(step: Step, decay: Decay, *, beta: float = 0.5) -> Descent:
    """`M' = beta M + G`, `Y' = (I - eta Lam) Y - eta M'` (Polyak, 1964)."""
    return Descent(step, decay, Momentum(beta), name="heavy ball")


def Nesterov(step: Step, decay: Decay, *, beta: float = 0.5) -> Descent:
    """`M' = beta M + G`, `Y' = (I - eta Lam) Y - eta (G + beta M')` (Nesterov, 1983, in Sutskever's form)."""
    return Descent(step, decay, NesterovDirection(beta), name="nesterov")


def Muon(step: Step, decay: Decay, *, beta: float = 0.5) -> Descent:
    """`M' = beta M + G`, `Y' = (I - eta Lam) Y - eta |M'|_F polar(M') / |polar(M')|_F` (after Jordan et al., 2024).

    For a matrix of rank one (the first step) this is heavy-ball itself.
    """
    return Descent(step, decay, Momentum(beta), Polar(), name="muon")


def Hyperball(step: Step) -> Descent:
    """`Y' = |Y| V / |V|`, `V = Y - eta |Y| G / |G|`: the state keeps its norm (after Wen et al., 2026).

    A step turns the state by at most arcsin(eta), and by arctan(eta) where the gradient is orthogonal to it; a decay
    would only rescale what is normalized away, so there is none.
    """
    return Descent(step, ConstantDecay(0.0), retract=Sphere(), name="hyperball")
