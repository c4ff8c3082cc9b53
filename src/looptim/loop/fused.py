"""The fast twin of `Transition.step` for streams: one projection for all controllers and two hand-written kernels.

It gives the state and the carry of the readable form, which stays the definition, and what it saves for the backward
is the state and one vector per token. Parts it does not know leave a transition readable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..base.numerics import wide
from . import kernels
from .base import ByGate, Context, Gate, Record, check_same_shape, rms_features
from .controls import ConstantDecay, ConstantStep
from .maps import Streams
from .projections import StreamMap, StreamRead
from .rules import Carry, Descent

if TYPE_CHECKING:
    from .reversible import Tape
    from .transition import Transition


class Kernels(NamedTuple):
    """The functions that do the heavy work, either plain or compiled."""

    read: Callable[..., tuple[Tensor, Tensor, Tensor]]
    write: Callable[..., Tensor]


EAGER = Kernels(kernels.read, kernels.write)


@functools.cache
def compiled_kernels() -> Kernels:
    """The compiled functions. Parameters are inputs, so one compilation serves all steps of all loops of a size."""
    return Kernels(torch.compile(kernels.read), torch.compile(kernels.write))


FORMS: dict[str, Callable[[], Kernels | None]] = {
    "fused": lambda: EAGER,
    "compiled": compiled_kernels,
    "readable": lambda: None,
}
"""The forms in which a transition may run."""


def form_of(transition: Transition) -> str:
    """The form in which a transition runs, and the part that keeps it readable although fusing was asked for."""
    unknown = unknown_part(transition)
    if transition.kernels is None or unknown is not None:
        return "readable" if transition.kernels is None else f"readable, for {unknown}"
    return "fused" if transition.kernels is EAGER else "compiled"


def unknown_part(transition: Transition) -> str | None:
    """The part that prevents a transition from running fused; None if it can."""
    projection, rule = transition.projection, transition.rule
    if type(projection) is not StreamRead or type(projection.map) is not StreamMap:
        return f"the projection {type(projection).__name__}"
    if transition.features is not rms_features:
        return "features of its own"
    if transition.write is not None and type(transition.write) is not StreamMap:
        return f"the write map {type(transition.write).__name__}"
    if type(rule) is not Descent:
        return f"the rule {type(rule).__name__}"
    for part, constant in ((rule.step, ConstantStep), (rule.decay, ConstantDecay)):
        if type(part) is not constant and type(part).forward is not ByGate.forward:
            return f"the {'step' if part is rule.step else 'decay'} {type(part).__name__}"
    return _altered(projection, projection.map, transition.write, rule, rule.step, rule.decay)


def _altered(*parts: nn.Module | None) -> str | None:
    """A part of a known class that computes something else than its class, by a hook or a forward of its own."""
    gates = [part.gate for part in parts if isinstance(part, ByGate)]
    for part in filter(None, (*parts, *gates)):
        hooks = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        if hooks or "forward" in vars(part):
            return f"what was added to {type(part).__name__}"
    return next((f"the gate {type(gate).__name__}" for gate in gates if type(gate) is not Gate), None)


def step(
    transition: Transition,
    run: Kernels,
    ctx: Context,
    blocks: Callable[[Tensor], Tensor],
    carry: Carry,
    tape: Tape | None = None,
) -> Record:
    """One fused step. With a `tape`, the state is rebuilt in the backward pass."""
    Y, projection, rule = ctx.Y, cast(StreamRead, transition.projection), cast(Descent, transition.rule)
    parts = [part for part in (projection.map, transition.write, rule.decay, rule.step) if isinstance(part, ByGate)]
    gates = [part.gate for part in parts]
    dtype = wide(Y).dtype
    W = wide(torch.cat([gate.W for gate in gates])).to(dtype)
    a, b = wide(torch.cat([*(gate.a for gate in gates), *(gate.b for gate in gates)])).to(dtype).chunk(2)
    with nullcontext() if tape is None else tape.instead_of(Y):
        o, v, Y = run.read(Y, W, a, b, projection.map.gate.gain)
    t = blocks(o)
    check_same_shape(t, o, "blocks", "the block input")
    t = t if transition.target is None else transition.target(t)
    g = transition.objective.grad(o, t)
    sigmoids = v.split([len(gate.b) for gate in gates], dim=-1)
    values: dict[Any, Tensor] = {
        part: _times(gate.gain, value) for part, gate, value in zip(parts, gates, sigmoids, strict=True)
    }

    def use(part: Any, *others: Any) -> Any:
        return part.use(values[part], *others) if part in values else part(None, *others)

    eta, lam = use(rule.step, carry.eta), use(rule.decay)
    H = Streams(values[projection.map])
    x = H if transition.write is None else Streams(values[transition.write])
    if rule.directions or rule.retract is not None:
        return Record(ctx, H, x, None, o, t, g, *rule.move(Y, x.write(g), eta, lam, carry))
    keep = 1 - eta * lam
    k = keep.squeeze(-1).expand(x.h.shape) if isinstance(keep, Tensor) else torch.full_like(x.h, keep)
    w = eta.squeeze(-1) * x.h if isinstance(eta, Tensor) else _times(eta, x.h)
    with nullcontext() if tape is None else tape.instead_of(Y):
        Y_next = run.write(Y, g, k, w)
    if tape is not None:
        tape.wrote(Y, Y_next, g, k, w)
    return Record(ctx, H, x, None, o, t, g, Y_next, Carry(eta, lam, None))


def _times(number: float, x: Tensor) -> Tensor:
    return x if number == 1 else number * x
