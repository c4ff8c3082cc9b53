"""Checks of any loop: whether it writes through the map it reads with, and whether each step is a gradient step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import final

import torch
from torch import Tensor

from ..base.markup import html_table
from .base import Context, require, symbol
from .causality import find_leak
from .loop import Loop
from .maps import Map
from .probe import changed_copy, float64_copy, is_finite, run
from .rules import Carry
from .transition import Record, Transition

TOLERANCE = 1e-9
"""Relative tolerance; everything here runs in float64."""


@final
@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The verdict on a loop: its maps, its objective, and which tokens it sees. It prints as a sentence."""

    name: str
    aligned: bool
    """Whether the error is written through the adjoint of the map the state is read with."""
    gap: float
    """`|H^T g - x^T g| / |H^T g|` over all steps: at the loop's own parameters or, where those hide a mismatch, at
    randomly changed ones."""
    hidden: bool
    """Whether the loop's own parameters hide a mismatch, as an identity matrix at initialization does."""
    adjoint_error: float
    """The dot-product test of every map, `|<H v, g> - <v, H^T g>|` relative to `|H v| |g|`; rounding if it is right."""
    causal: bool
    """Whether the adjoint of the read writes to no earlier token; otherwise the loop cannot be aligned."""
    read: str
    write: str
    leak: str | None = None
    """The message of `check_causality` about a part that sees later tokens or other sequences."""
    derivative: str | None = None
    """What is wrong with the `grad` of the objective, such as its sign."""

    def __str__(self) -> str:
        if self.leak is not None:
            return f"{self.leak}; training would refuse it; fix that part."
        if self.derivative is not None:
            return f"{self.name}: {self.derivative}; correct it."
        if self.adjoint_error > TOLERANCE:
            return (
                f"{self.name}: the `write` of a map is not the adjoint of its `read`: the dot-product test is off by "
                f"{self.adjoint_error:.2g}; correct that map's `write`."
            )
        if self.aligned:
            return f"{self.name}: aligned; it reads and writes through {self.read}."
        gap = f"the write differs from the gradient's by {self.gap:.0%}"
        if self.hidden:
            gap = f"the two agree at these parameters but differ by {self.gap:.0%} at randomly changed ones"
        advice = "looptim.align(loop) drops the separate write map"
        if not self.causal:
            advice = "it cannot be aligned, since the adjoint would write to earlier tokens"
        return f"{self.name}: mismatch; it reads through {self.read} but writes through {self.write}, {gap}; {advice}."

    def _repr_html_(self) -> str:
        rows = [(key, f"{value:.3g}" if isinstance(value, float) else value) for key, value in vars(self).items()]
        return html_table(rows, title=str(self))


def diagnose(loop: Loop) -> Diagnosis:
    """Check numerically, for any loop, that it writes through the map it reads with and is what it says it is.

    Runs every step in float64 on random inputs, at the loop's parameters and at randomly changed ones, and compares
    the write used, `x^T g`, with the gradient's, `H^T g` (Eq. 10), and `grad` with the derivative of `value`. Then
    later tokens and other sequences are changed, as in `check_causality`. The loop itself is left untouched.

    >>> import looptim as lo
    >>> print(lo.diagnose(lo.build("vanilla", width=8, steps=2)))
    vanilla: aligned; it reads and writes through I.
    """
    return dataclasses.replace(diagnose_maps(loop), leak=find_leak(loop)[0])


def diagnose_maps(loop: Loop) -> Diagnosis:
    """The diagnosis without the check of what tokens see, which takes ten times as long."""
    require("loop", loop, Loop)
    own = _Probe(float64_copy(loop))
    if not own.finite:
        raise ValueError(f"{loop.name} gives values that are not finite on normal inputs; check its parameters first")
    changed = changed_copy(loop)
    general = own if changed is None else _Probe(changed)
    hidden = own.gap <= TOLERANCE < general.gap
    shown = general if hidden else own
    adjoint_error = max(own.adjoint_error, general.adjoint_error)
    derivative = own.derivative or general.derivative or _climbing(float64_copy(loop))
    transition = loop.schedule()[shown.worst_step]
    return Diagnosis(
        name=loop.name,
        aligned=derivative is None and max(own.gap, general.gap, adjoint_error) <= TOLERANCE,
        gap=shown.gap,
        hidden=hidden,
        adjoint_error=adjoint_error,
        causal=own.causal,
        read=read_map(transition),
        write=input_map(transition),
        derivative=derivative,
    )


def read_map(transition: Transition) -> str:
    return transition.projection.map_symbol


def input_map(transition: Transition) -> str:
    return read_map(transition) if transition.write is None else symbol(transition.write)


def align(loop: Loop) -> Loop:
    """The same loop without its separate write maps: same modules, never a new parameter (Section 5.1).

    >>> import looptim as lo
    >>> lo.describe(lo.align(lo.build("hyperloop", width=8, steps=3))).input_map
    'H_pre'
    """
    require("loop", loop, Loop)
    steps = loop.schedule(1) if loop.shared else loop.schedule()
    if all(transition.write is None for transition in steps):
        return loop
    for transition in steps:
        if not _map_of(transition, loop).causal:
            raise ValueError(
                f"{loop.name} cannot be aligned: the adjoint of {read_map(transition)} writes to earlier tokens, "
                "which a causal model must not; turn off the token shift first"
            )
    aligned = [Transition(t.projection, t.objective, t.rule, target=t.target, features=t.features) for t in steps]
    return Loop(
        aligned[0] if loop.shared else aligned,
        width=loop.width,
        steps=loop.steps,
        start=loop.start,
        readout=loop.readout,
        normed=loop.normed,
        name=f"{loop.name}_aligned",
        summary=f"The aligned twin of {loop.name}: the error is written through the map the state is read with.",
    ).train(loop.training)


def _map_of(transition: Transition, loop: Loop) -> Map:
    """The map with which a transition reads a zero state. It needs no values, so it works on the meta device too."""
    tensor = next(itertools.chain(loop.parameters(), loop.buffers()), torch.empty(0))
    with torch.no_grad():
        e = torch.zeros(1, 1, loop.width, dtype=tensor.dtype, device=tensor.device)
        Y = loop.start(e)
        Z = None if transition.features is None else transition.features(Y)
        return transition.projection(Context(Y, Z, e))[0]


def check_gradient(loop: Loop, *, allow_mismatch: bool = False) -> float:
    """Raise unless every step equals the rule applied to autograd's gradient of the local objective.

    `H`, `b` and `t` are held fixed, as in the paper's derivation (Appendix E). The check runs in float64, at the loop's
    own parameters and at randomly changed ones, and returns the largest relative error, which is rounding. With
    `allow_mismatch`, as before a training, a separate write map may differ from the adjoint of the read.

    >>> import looptim as lo
    >>> lo.check_gradient(lo.build("operloop", width=8, steps=3)) < 1e-12
    True
    """
    require("loop", loop, Loop)
    worst = 0.0
    twins = (float64_copy(loop), changed_copy(loop))
    climbing = _climbing(float64_copy(loop))
    if climbing is not None:
        raise ValueError(f"a step of {loop.name} is not the gradient step of its local objective: {climbing}")
    for transition, carry, record in itertools.chain.from_iterable(run(twin) for twin in twins if twin is not None):
        wrong = _wrong_derivative(transition, record)
        if wrong is not None:
            raise ValueError(f"a step of {loop.name} is not the gradient step of its local objective: {wrong}")
        if allow_mismatch and transition.write is not None:
            continue
        expected = _autograd_step(transition, carry, record)
        error = _relative(record.Y, expected)
        worst = max(worst, error)
        if not error <= TOLERANCE:
            raise ValueError(
                f"a step of {loop.name} is not the gradient step of its local objective: it is off by {error:.2g} "
                f"(relative); {diagnose_maps(loop)}"
            )
    return worst


def _wrong_derivative(transition: Transition, record: Record) -> str | None:
    """What is wrong with the `grad` of the objective, compared with autograd's derivative of its `value`."""
    o = record.o.detach().requires_grad_()
    with torch.enable_grad():
        (expected,) = torch.autograd.grad(transition.objective.value(o, record.t.detach()).sum(), o)
    error = _relative(record.g, expected)
    if error <= TOLERANCE:
        return None
    wrong = f"`grad` of {type(transition.objective).__name__} is not the derivative of its `value`, it "
    return wrong + ("has the wrong sign" if _relative(-record.g, expected) <= TOLERANCE else f"is off by {error:.2g}")


def _climbing(loop: Loop) -> str | None:
    """Which rule leads the state up the gradient, at the loop's own parameters."""
    for transition, carry, record in run(loop):
        G, ends = record.x.write(record.g), []
        for gradient in (G, -G):
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.default_generator.manual_seed(0)
                ends.append(transition.rule(record.ctx.Y, gradient, record.ctx, carry)[0])
        if ((ends[0] - ends[1]) * G).sum() > 1e-6 * (ends[0].norm() + ends[1].norm()) * G.norm():
            return f"the rule {type(transition.rule).__name__} adds the gradient, which has the wrong sign"
    return None


def _relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def _autograd_step(transition: Transition, carry: Carry, record: Record) -> Tensor:
    """The next state with `dL/dY` from autograd instead of `H^T f'(o)`."""
    Y = record.ctx.Y.detach().requires_grad_()
    b = 0.0 if record.b is None else record.b.detach()
    with torch.enable_grad():
        L = transition.objective.value(record.H.read(Y) + b, record.t.detach()).sum()
        (G,) = torch.autograd.grad(L, Y)
    return transition.rule(record.ctx.Y, G, record.ctx, carry)[0].detach()


@final
class _Probe:
    """What one run of a loop reveals about its maps."""

    def __init__(self, loop: Loop):
        self.adjoint_error = 0.0
        self.derivative: str | None = None
        self.causal = self.finite = True
        differences, sizes = [], []
        for transition, _, record in run(loop):
            self.derivative = self.derivative or _wrong_derivative(transition, record)
            gradient, written = record.H.write(record.g), record.x.write(record.g)
            self.finite &= is_finite(record)
            differences.append((gradient - written).norm().item())
            sizes.append(gradient.norm().item())
            self.causal &= record.H.causal and _writes_forward(record.H, record.g)
            self.adjoint_error = max(
                self.adjoint_error, *(_dot_product_test(map, record) for map in (record.H, record.x))
            )
        self.gap = math.hypot(*differences) / max(math.hypot(*sizes), 1e-300)
        self.worst_step = max(range(len(differences)), key=differences.__getitem__)


def _writes_forward(map: Map, g: Tensor) -> bool:
    """Whether writes to the tokens before the last are independent of the last token's error."""
    without = torch.cat([g[:, :-1], torch.zeros_like(g[:, -1:])], dim=1)
    return torch.equal(map.write(g)[:, :-1], map.write(without)[:, :-1])


def _dot_product_test(map: Map, record: Record) -> float:
    """`<H v, g> = <v, H^T g>` for a random `v`; `H v` is the derivative of the read, which nonlinear maps have too."""
    generator = torch.Generator("cpu").manual_seed(2)
    v = torch.randn(record.ctx.Y.shape, generator=generator, dtype=torch.float64, device="cpu")
    Hv = torch.func.jvp(map.read, (record.ctx.Y,), (v,))[1]
    scale = (Hv.norm() * record.g.norm()).clamp_min(1e-300)
    return (((Hv * record.g).sum() - (v * map.write(record.g)).sum()).abs() / scale).item()
