"""The paper's roadmap (Section 6) as presets: OperLoop with one part exchanged, so that a comparison has one cause."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .controls import Decay, Step
from .loop import Loop
from .objectives import PseudoHuber
from .presets import operloop_transition, streamed
from .projections import BoundedRead
from .registry import register
from .rules import HeavyBall, Hyperball, MomentumRule, Muon, Nesterov, Rule


def _operloop_with(width: int, steps: int, *, streams: int, shared: bool, **parts: Any) -> Loop:
    return streamed(lambda: operloop_transition(width, streams, **parts), width, steps, streams=streams, shared=shared)


def _momentum(rule: type[MomentumRule], beta: float) -> Callable[[Step, Decay], Rule]:
    return partial(rule, beta=beta)


@register
def operloop_heavyball(width: int, steps: int, *, streams: int = 4, shared: bool = False, beta: float = 0.5) -> Loop:
    """OperLoop with heavy-ball momentum over the loops: M' = β M + G, Y' = (I − η Λ) Y − η M'."""
    return _operloop_with(width, steps, streams=streams, shared=shared, rule=_momentum(HeavyBall, beta))


@register
def operloop_nesterov(width: int, steps: int, *, streams: int = 4, shared: bool = False, beta: float = 0.5) -> Loop:
    """OperLoop with Nesterov momentum over the loops: M' = β M + G, Y' = (I − η Λ) Y − η (G + β M')."""
    return _operloop_with(width, steps, streams=streams, shared=shared, rule=_momentum(Nesterov, beta))


@register
def operloop_muon(width: int, steps: int, *, streams: int = 4, shared: bool = False, beta: float = 0.5) -> Loop:
    """OperLoop with a Muon step: the polar factor of the r x d momentum, at the momentum's own size."""
    return _operloop_with(width, steps, streams=streams, shared=shared, rule=_momentum(Muon, beta))


@register
def operloop_hyperball(width: int, steps: int, *, streams: int = 4, shared: bool = False) -> Loop:
    """OperLoop on a sphere: the state keeps its norm, and the step size says how far it turns."""
    return _operloop_with(width, steps, streams=streams, shared=shared, rule=lambda step, decay: Hyperball(step))


@register
def operloop_bounded(width: int, steps: int, *, streams: int = 4, shared: bool = False, bound: float = 4.0) -> Loop:
    """OperLoop with a nonlinear projection, o = c tanh(H_in Y / c), written back through its pullback."""
    projection = partial(BoundedRead, width=width, bound=bound)
    return _operloop_with(width, steps, streams=streams, shared=shared, projection=projection)


@register
def operloop_robust(width: int, steps: int, *, streams: int = 4, shared: bool = False, c: float = 1.0) -> Loop:
    """OperLoop with a robust objective: the delta objective near the target, linear beyond an error of c."""
    return _operloop_with(width, steps, streams=streams, shared=shared, objective=partial(PseudoHuber, c))
