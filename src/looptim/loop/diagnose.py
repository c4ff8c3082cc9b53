"""Questions one can ask any loop: what is it, does it write through the map it reads with, is it a gradient step."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from .maps import Map
from .part import Context
from .rules import Carry
from .transition import Loop, Record, Transition

TOLERANCE = 1e-9
"""Relative; everything here runs in float64."""


@final
@dataclasses.dataclass(frozen=True)
class Description:
    """A row of the paper's Table 7, computed from the parts of a loop."""

    name: str
    projection: str
    """`o`."""
    decay: str
    """`lambda`."""
    step: str
    """`eta`."""
    input_map: str
    """`x`, the map the error is written through."""
    objective: str
    """`L`."""
    target: str
    """`t`."""
    rule: str
    """The update, with `G = x^T L'(o)`."""
    aligned: bool
    loop_specific: bool
    start: str
    readout: str
    parameters: int
    where: tuple[str, ...]
    """What the letters stand for."""
    summary: str

    def __str__(self) -> str:
        rows = {
            "projection": f"o = {self.projection}",
            "target": f"t = {self.target}",
            "objective": f"L = {self.objective}",
            "input map": f"x = {self.input_map} ({'aligned' if self.aligned else 'mismatch with the projection'})",
            "step size": f"η = {self.step}",
            "decay": f"λ = {self.decay}",
            "update": f"{self.rule}, G = xᵀ L′(o)",
            "start": f"Y_0 = {self.start}",
            "read-out": self.readout,
            "parameters": f"{self.parameters:,} ({'loop-specific' if self.loop_specific else 'shared by all loops'})",
        }
        lines = [self.name + (f": {self.summary}" if self.summary else "")]
        lines += [f"  {key:<11} {value}" for key, value in rows.items()]
        lines += [f"  {'where':<11} {text}" for text in self.where]
        return "\n".join(lines)


def describe(loop: Loop) -> Description:
    """The loop's row of the paper's table, read off its parts, so that it cannot drift from the code.

    >>> import looptim as lo
    >>> row = lo.describe(lo.build("hyperloop", width=8, steps=3))
    >>> row.projection, row.decay, row.step, row.input_map, row.objective, row.aligned
    ('H_pre Y', 'I − H_res', '1', 'H_post', '−⟨t, o⟩', False)
    """
    transition = loop.schedule()[0]
    rule = transition.rule
    parts = [transition.projection, transition.write, rule.step, rule.decay, transition.objective]
    where = [getattr(part, "where", "") for part in parts if part is not None]
    return Description(
        name=loop.name,
        projection=_symbol(transition.projection),
        decay=_symbol(rule.decay),
        step=_symbol(rule.step),
        input_map=_input_map(transition),
        objective=_symbol(transition.objective),
        target="Blocks(o)" if transition.target is None else _symbol(transition.target),
        rule=_symbol(rule),
        aligned=diagnose(loop).aligned,
        loop_specific=not loop.shared,
        start=_symbol(loop.start),
        readout=_symbol(loop.readout),
        parameters=sum(p.numel() for p in loop.parameters()),
        where=tuple(dict.fromkeys(filter(None, where))),
        summary=loop.summary,
    )


def _symbol(part: object) -> str:
    """A part's symbol; a user's part without one goes by the name of its class."""
    symbol = getattr(part, "symbol", "?")
    return type(part).__name__ if symbol == "?" else symbol


def _read_map(transition: Transition) -> str:
    return transition.projection.map_symbol


def _input_map(transition: Transition) -> str:
    return _read_map(transition) if transition.write is None else _symbol(transition.write)


@final
@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The verdict on a loop's input map; prints as a sentence."""

    name: str
    aligned: bool
    """Whether the error is written through the adjoint of the map the state is read with."""
    gap: float
    """`|H^T g - x^T g| / |H^T g|` over all steps: at the loop's own parameters or, where those hide a mismatch, at
    randomly changed ones."""
    hidden: bool
    """Whether the loop's own parameters hide a mismatch, as an identity matrix at initialisation does."""
    adjoint_error: float
    """The dot-product test of every map, `|<H v, g> - <v, H^T g>|` relative to `|H v| |g|`; rounding if it is right."""
    causal: bool
    """Whether the adjoint of the read writes to no earlier token; without it no alignment is possible."""
    read: str
    write: str

    def __str__(self) -> str:
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


def diagnose(loop: Loop) -> Diagnosis:
    """Does the loop write through the map it reads with? Answered by numbers, for any loop.

    Runs every step in float64 on random inputs, at the loop's parameters and at randomly changed ones, and compares
    the write used, `x^T g`, with the gradient's, `H^T g` (Eq. 10). The loop itself is left untouched.

    >>> import looptim as lo
    >>> print(lo.diagnose(lo.build("vanilla", width=8, steps=2)))
    vanilla: aligned; it reads and writes through I.
    """
    own = _Probe(loop)
    general = _Probe(loop, perturb=True)
    transition = loop.schedule()[0]
    hidden = own.gap <= TOLERANCE < general.gap
    adjoint_error = max(own.adjoint_error, general.adjoint_error)
    return Diagnosis(
        name=loop.name,
        aligned=max(own.gap, general.gap, adjoint_error) <= TOLERANCE,
        gap=general.gap if hidden else own.gap,
        hidden=hidden,
        adjoint_error=adjoint_error,
        causal=own.causal,
        read=_read_map(transition),
        write=_input_map(transition),
    )


def align(loop: Loop) -> Loop:
    """The same loop with its separate write maps dropped: same modules, never a new parameter (Section 5.1).

    >>> import looptim as lo
    >>> lo.describe(lo.align(lo.build("hyperloop", width=8, steps=3))).input_map
    'H_pre'
    """
    if all(transition.write is None for transition in loop.schedule()):
        return loop
    if not _first_map(loop).causal:
        raise ValueError(
            f"{loop.name} cannot be aligned: the adjoint of {_read_map(loop.schedule()[0])} writes to earlier tokens, "
            "which a causal model must not; switch the token shift off first"
        )
    aligned = [
        Transition(t.projection, t.objective, t.rule, target=t.target, features=t.features)
        for t in dict.fromkeys(loop.schedule())
    ]
    return Loop(
        aligned[0] if loop.shared else aligned,
        width=loop.width,
        steps=loop.steps,
        start=loop.start,
        readout=loop.readout,
        name=f"{loop.name}_aligned",
        summary=f"Aligned: the write goes through the map of the read. {loop.summary}".strip(),
    )


def _first_map(loop: Loop) -> Map:
    """The map of the first read, at a zero state; needs no values, so that a loop on the meta device has one too."""
    tensor = next(itertools.chain(loop.parameters(), loop.buffers()), torch.empty(0))
    with torch.no_grad():
        e = torch.zeros(1, 1, loop.width, dtype=tensor.dtype, device=tensor.device)
        Y, transition = loop.start(e), loop.schedule()[0]
        Z = None if transition.features is None else transition.features(Y)
        return transition.projection(Context(Y, Z, e))[0]


def check_gradient(loop: Loop) -> float:
    """Check that every step is the rule applied to autograd's gradient of the local objective, or raise.

    `H`, `b` and `t` are held fixed, as in the paper's derivation (Appendix E). Checked in float64, at the loop's own
    parameters and at randomly changed ones. Returns the largest relative error found, which is rounding.

    >>> import looptim as lo
    >>> lo.check_gradient(lo.build("operloop", width=8, steps=3)) < 1e-12
    True
    """
    worst = 0.0
    for transition, carry, record in itertools.chain(
        _run(_float64_copy(loop)), _run(_float64_copy(loop, perturb=True))
    ):
        expected = _autograd_step(transition, carry, record)
        error = ((record.Y - expected).norm() / expected.norm().clamp_min(1e-300)).item()
        worst = max(worst, error)
        if not error <= TOLERANCE:
            raise ValueError(
                f"a step of {loop.name} is not the gradient step of its local objective: it is off by {error:.2g} "
                f"(relative); {diagnose(loop)}"
            )
    return worst


def _autograd_step(transition: Transition, carry: Carry, record: Record) -> Tensor:
    """The next state from `dL/dY` by autograd instead of `H^T f'(o)`."""
    Y = record.ctx.Y.detach().requires_grad_()
    b = 0.0 if record.b is None else record.b.detach()
    with torch.enable_grad():
        L = transition.objective.value(record.H.read(Y) + b, record.t.detach()).sum()
        (G,) = torch.autograd.grad(L, Y)
    return transition.rule(record.ctx.Y, G, record.ctx, carry)[0].detach()


def _float64_copy(loop: Loop, *, perturb: bool = False) -> Loop:
    """A copy in float64 on the CPU, in eval mode, its parameters randomly changed if asked."""
    loop = copy.deepcopy(loop).to("cpu", torch.float64).eval()
    if perturb:
        generator = torch.Generator().manual_seed(1)
        for p in loop.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.data.add_(noise / math.sqrt(p.shape[-1]) if p.dim() > 1 else 0.3 * noise)
    return loop


def _run(loop: Loop) -> Iterator[tuple[Transition, Carry, Record]]:
    """Every step of the loop on random inputs, with a fixed random network in place of the blocks."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    M = normal(loop.width, loop.width) / math.sqrt(loop.width)
    e = normal(2, 5, loop.width)
    with torch.no_grad():
        Y = loop.start(e)
        carry = loop.schedule()[0].rule.init(Y)
        for transition in loop.schedule():
            record = transition.step(Y, e, lambda o: o + torch.tanh(o @ M), carry)
            yield transition, carry, record
            Y, carry = record.Y, record.carry


@final
class _Probe:
    """What one run of a loop tells about its maps."""

    def __init__(self, loop: Loop, *, perturb: bool = False):
        self.adjoint_error = 0.0
        self.causal = True
        difference = size = 0.0
        for _, _, record in _run(_float64_copy(loop, perturb=perturb)):
            gradient = record.H.write(record.g)
            difference += (gradient - record.x.write(record.g)).square().sum().item()
            size += gradient.square().sum().item()
            self.causal &= record.H.causal
            for map in (record.H, record.x):
                self.adjoint_error = max(self.adjoint_error, _dot_product_test(map, record))
        self.gap = math.sqrt(difference / max(size, 1e-300))


def _dot_product_test(map: Map, record: Record) -> float:
    """`<H v, g> = <v, H^T g>` for a random `v`; `H v` is the derivative of the read, which nonlinear maps have too."""
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(record.ctx.Y.shape, generator=generator, dtype=torch.float64)
    Hv = torch.func.jvp(map.read, (record.ctx.Y,), (v,))[1]
    scale = (Hv.norm() * record.g.norm()).clamp_min(1e-300)
    return (((Hv * record.g).sum() - (v * map.write(record.g)).sum()).abs() / scale).item()
