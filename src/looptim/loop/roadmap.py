"""The paper's roadmap (Section 6) as presets: OperLoop with one part exchanged, so that a comparison has one cause."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from .base import signature_of
from .loop import Loop
from .objectives import PseudoHuber
from .presets import operloop, operloop_transition, streamed
from .projections import BoundedRead
from .registry import register
from .rules import HeavyBall, Hyperball, Muon, Nesterov


def _register_variant(preset: Callable[..., dict[str, Any]]) -> Callable[..., Loop]:
    """Register a preset that is OperLoop with the parts that `preset` returns; it also has OperLoop's options."""
    own = signature_of(preset).parameters
    exchanged = preset(1, **{name: option.default for name, option in own.items() if name != "width"})
    inherited = [
        option
        for name, option in signature_of(operloop).parameters.items()
        if name not in {"width", "steps", *exchanged} and name not in own
    ]

    @functools.wraps(preset)
    def variant(width: int, steps: int, **options: Any) -> Loop:
        parts = preset(width, **{name: options.pop(name) for name in own.keys() & options.keys()})
        streams, shared = options.pop("streams", 4), options.pop("shared", False)
        later_step = options.pop("later_step", None)
        make = partial(operloop_transition, width, streams, **parts, **options)
        return streamed(make, width, steps, streams=streams, shared=shared, later_step=later_step)

    steps = inspect.Parameter("steps", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    width, *added = own.values()
    variant.__signature__ = inspect.Signature([width, steps, *added, *inherited])  # pyright: ignore
    return register(variant)


@_register_variant
def operloop_heavyball(width: int, *, beta: float = 0.5) -> dict[str, Any]:
    """OperLoop with heavy-ball momentum over the loops: M' = β M + G, Y' = (I − η Λ) Y − η M'."""
    return {"rule": partial(HeavyBall, beta=beta)}


@_register_variant
def operloop_nesterov(width: int, *, beta: float = 0.5) -> dict[str, Any]:
    """OperLoop with Nesterov momentum over the loops: M' = β M + G, Y' = (I − η Λ) Y − η (G + β M')."""
    return {"rule": partial(Nesterov, beta=beta)}


@_register_variant
def operloop_muon(width: int, *, beta: float = 0.5) -> dict[str, Any]:
    """OperLoop with a Muon step: the polar factor of the r x d momentum, at the momentum's own size."""
    return {"rule": partial(Muon, beta=beta)}


@_register_variant
def operloop_hyperball(width: int) -> dict[str, Any]:
    """OperLoop on a sphere: the state keeps its norm, and the step size says how far it turns."""
    return {"rule": lambda step, decay: Hyperball(step)}


@_register_variant
def operloop_bounded(width: int, *, bound: float = 4.0) -> dict[str, Any]:
    """OperLoop with a nonlinear projection, o = c tanh(H_in Y / c), written back through its pullback."""
    return {"projection": partial(BoundedRead, width=width, bound=bound)}


@_register_variant
def operloop_robust(width: int, *, c: float = 1.0) -> dict[str, Any]:
    """OperLoop with a robust objective: the delta objective near the target, linear beyond an error of c."""
    return {"objective": partial(PseudoHuber, c)}
