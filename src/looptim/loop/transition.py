"""One optimizer step on the state, from a projection, an objective and a rule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..base.numerics import rms_norm
from . import fused
from .base import Context, Part, Record, check_same_shape, require, rms_features
from .maps import Map
from .objectives import Objective
from .projections import MapPart, Projection
from .rules import Carry, Descent, Rule

if TYPE_CHECKING:
    from jaxtyping import Float

    from .reversible import Tape


class Target(Part):
    """How the blocks' output becomes the target `t`. `symbol` is written with `Blocks(o)`."""

    @abstractmethod
    def forward(self, t: Float[Tensor, "B T d"]) -> Float[Tensor, "B T d"]:
        """The target."""


@final
class TargetBias(Target):
    """`t = Blocks(o) + e_l`, the loop's own output bias (Appendix B).

    >>> TargetBias(2)(torch.ones(1, 1, 2)).tolist()
    [[[1.0, 1.0]]]
    """

    symbol = "Blocks(o) + e_l"

    def __init__(self, width: int, *, std: float = 0.0):
        super().__init__()
        self.bias = nn.Parameter(std * torch.randn(width))

    def forward(self, t: Tensor) -> Tensor:
        return t + self.bias.to(t.dtype)


@final
class TargetNorm(Target):
    """`t = RMSNorm(Blocks(o))`: Ouro as released, with the final norm inside the loop.

    At a zero state its derivative is `1 / sqrt(eps)`, again in every loop, as in consecutive layers.

    >>> TargetNorm(2)(torch.full((1, 1, 2), 7.0)).round(decimals=3).tolist()
    [[[1.0, 1.0]]]
    """

    symbol = "RMSNorm(Blocks(o))"

    def __init__(self, width: int, *, eps: float = 1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, t: Tensor) -> Tensor:
        return rms_norm(t, self.gain, self.eps)


@final
class Transition(nn.Module):
    """`Y' = (I - eta Lam) Y - eta H^T f'(H Y + b)` with `t = Blocks(o)` (Proposition 1), from three parts.

    Leaving `write` out means aligned: the error goes back through the adjoint of the map that the state was read with.
    Only a mismatch has to be spelled out. `features` computes what the controllers look at, once for all of them.

    >>> import looptim as lo
    >>> step = lo.Transition(
    ...     lo.projections.Plain(),
    ...     lo.objectives.InnerProduct(),
    ...     lo.rules.GradientDescent(lo.controls.ConstantStep(), lo.controls.ConstantDecay()),
    ... )
    >>> Y = torch.ones(1, 1, 1, 2)
    >>> Y, carry = step(Y, torch.zeros(1, 1, 2), lambda o: 3 * o, step.rule.init(Y))
    >>> Y.tolist()
    [[[[3.0, 3.0]]]]
    """

    def __init__(
        self,
        projection: Projection,
        objective: Objective,
        rule: Rule,
        *,
        write: MapPart | None = None,
        target: Target | None = None,
        features: Callable[[Tensor], Tensor] | None = rms_features,
    ):
        super().__init__()
        require("projection", projection, Projection)
        require("objective", objective, Objective)
        require("rule", rule, Rule)
        for name, part, kind in (("write", write, MapPart), ("target", target, Target)):
            if part is not None:
                require(name, part, kind)
        self.projection = projection
        self.objective = objective
        self.rule = rule
        self.write = write
        self.target = target
        self.features = features
        self.kernels: fused.Kernels | None = fused.EAGER
        """What runs the fused form; None for the readable form."""

    def step(
        self,
        Y: Float[Tensor, "B T r d"],
        e: Float[Tensor, "B T d"],
        blocks: Callable[[Tensor], Tensor],
        carry: Carry,
    ) -> Record:
        """One step, with everything it computes."""
        ctx, H, b, o = self._read(Y, e)
        return self._move(ctx, H, b, o, blocks(o), carry)

    def _read(self, Y: Tensor, e: Tensor) -> tuple[Context, Map, Tensor | None, Tensor]:
        """What comes before the blocks: the context, the map, the bias and the block input."""
        Z = None if self.features is None else self.features(Y)
        ctx = Context(Y, Z, e)
        H, b = check_projection(self.projection, self.projection(ctx), e)
        o = H.read(Y) if b is None else H.read(Y) + b
        check_same_shape(o, e, f"`H Y + b` of the projection {type(self.projection).__name__}", "the loop's input")
        return ctx, H, b, o

    def _move(self, ctx: Context, H: Map, b: Tensor | None, o: Tensor, t: Tensor, carry: Carry) -> Record:
        """What comes after them."""
        check_same_shape(t, o, "blocks", "the block input")
        t = t if self.target is None else self.target(t)
        g = self.objective.grad(o, t)
        check_same_shape(g, o, f"`grad` of {type(self.objective).__name__}", "the block input")
        x = H if self.write is None else self.write(ctx)
        G = x.write(g)
        check_same_shape(G, ctx.Y, f"the write map {type(x).__name__}", "the state")
        Y_next, carry = check_moved(self.rule, self.rule(ctx.Y, G, ctx, carry), ctx.Y)
        return Record(ctx, H, x, b, o, t, g, Y_next, carry)

    def run(
        self,
        Y: Float[Tensor, "B T r d"],
        e: Float[Tensor, "B T d"],
        blocks: Callable[[Tensor], Tensor],
        carry: Carry,
        tape: Tape | None = None,
    ) -> Record:
        """One step, fused if every part is known; features are then not computed. Only the fused form uses a `tape`."""
        if self.kernels is not None and fused.unknown_part(self) is None:
            return fused.step(self, self.kernels, Context(Y, None, e), blocks, carry, tape)
        return self.step(Y, e, blocks, carry)

    @property
    def _keeps_little(self) -> bool:
        rule = self.rule
        plain = isinstance(rule, Descent) and not rule.directions and rule.retract is None
        return plain and self.kernels is not None

    def forward(
        self,
        Y: Float[Tensor, "B T r d"],
        e: Float[Tensor, "B T d"],
        blocks: Callable[[Tensor], Tensor],
        carry: Carry,
        tape: Tape | None = None,
        recompute: bool = False,
    ) -> tuple[Float[Tensor, "B T r d"], Carry]:
        """The next state and the next carry of `run`.

        With `recompute` the state, the block input and the target are all that is kept for the backward, which
        computes the rest again. The fused form of a plain rule keeps as little by itself, and parts that are not known
        are left alone: some differentiate by torch.func, which takes no part in recomputation.
        """
        if recompute and torch.is_grad_enabled() and fused.unknown_part(self) is None and not self._keeps_little:
            o = cast(Tensor, checkpoint(lambda Y, e: self._read(Y, e)[-1], Y, e, use_reentrant=False))

            def move(Y: Tensor, e: Tensor, t: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
                record = self._move(*self._read(Y, e), t, carry)
                return record.Y, record.carry

            return cast(Any, checkpoint(move, Y, e, blocks(o), carry, use_reentrant=False))
        record = self.run(Y, e, blocks, carry, tape)
        return record.Y, record.carry


def check_projection(projection: Projection, given: Any, e: Tensor) -> tuple[Map, Tensor | None]:
    """Check that a projection returned a map, and a bias that can be added to what the map reads."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Map):
        if given[1] is not None and not isinstance(given[1], Tensor):
            kind = type(given[1]).__name__
            raise ValueError(
                f"the bias of the projection {type(projection).__name__} is a {kind}, not a tensor or None"
            )
        if given[1] is not None and (given[1].dim() > 3 or given[1].shape[-1:] != e.shape[-1:]):
            check_same_shape(given[1], e, f"the bias of the projection {type(projection).__name__}", "the loop's input")
        return given
    inside = f" of {', '.join(type(each).__name__ for each in given)}" if isinstance(given, tuple) else ""
    raise ValueError(
        f"the projection {type(projection).__name__} gave a {type(given).__name__}{inside}; its forward must return "
        "the map `H` and the bias `b`, as in `return looptim.maps.Identity(), ctx.e`, with None for no bias"
    )


def check_moved(rule: Rule, given: Any, Y: Tensor) -> tuple[Tensor, Carry]:
    """Check that a rule returned the next state and what it carries."""
    name = type(rule).__name__
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Carry)):
        raise ValueError(f"the rule {name} gave a {type(given).__name__}; it must return the next state and a Carry")
    check_same_shape(given[0], Y, f"the rule {name}", "the state")
    return given
