"""Looking inside a loop while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from ..base.markup import html_table
from .controls import StreamMatrix
from .loop import Loop
from .maps import Map
from .transition import Record, Transition


@final
@dataclasses.dataclass(repr=False)
class Trace:
    """What every step computed: lists with one entry per step, except `state`, which also has the first one, `Y_0`.

    Several loops, or several calls, follow one another in the order they ran.
    """

    state: list[Tensor] = dataclasses.field(default_factory=list)
    """`Y_0 .. Y_R`, (B, T, r, d)."""
    read: list[Tensor] = dataclasses.field(default_factory=list)
    """`o`, (B, T, d)."""
    target: list[Tensor] = dataclasses.field(default_factory=list)
    """`t`, with the target bias, (B, T, d)."""
    step_size: list[Tensor] = dataclasses.field(default_factory=list)
    """`eta`, broadcastable to the state."""
    decay: list[Tensor] = dataclasses.field(default_factory=list)
    """`lam`, broadcastable to the state, or a matrix over the streams."""
    input_map: list[Map] = dataclasses.field(default_factory=list)
    """`H`, the map the state was read with; `.read(Y)` and `.write(g)` apply it."""
    write_map: list[Map] = dataclasses.field(default_factory=list)
    """`x`, the map the error was written with; the same object where the transition is aligned."""
    objective: list[Tensor] = dataclasses.field(default_factory=list)
    """`f(o)`, (B, T)."""

    HEAD: ClassVar = ("step", "objective", "step size", "decay", "read, RMS", "target, RMS")

    def rows(self) -> list[list[str]]:
        """The means over tokens of what every step computed, as strings."""
        columns = (self.objective, self.step_size, self.decay)
        means = zip(*([value.float().mean().item() for value in column] for column in columns), strict=True)
        sizes = zip(*([_rms(value) for value in column] for column in (self.read, self.target)), strict=True)
        numbers = [[*mean, *size] for mean, size in zip(means, sizes, strict=True)]
        return [[str(step), *(f"{number:.4g}" for number in row)] for step, row in enumerate(numbers, 1)]

    def __repr__(self) -> str:
        shapes = "x".join(map(str, self.state[0].shape)) if self.state else "none"
        lines = [f"Trace of {len(self.read)} steps, state {shapes}; means over tokens:", "  ".join(self.HEAD)]
        widths = [len(name) for name in self.HEAD]
        rows = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in self.rows()]
        return "\n".join([*lines, *rows])

    def _repr_html_(self) -> str:
        return html_table(self.rows(), head=self.HEAD, title=f"{len(self.read)} steps; means over tokens")


def _rms(value: Tensor) -> float:
    return value.float().square().mean().sqrt().item()


@contextmanager
def trace(module: nn.Module) -> Iterator[Trace]:
    """Record every loop inside `module` (a `Loop` or a model that contains some) while the context is open.

    Nothing is detached and nothing is computed twice. Compiled modules run eagerly in the meantime.

    >>> import looptim as lo
    >>> loop = lo.build("operloop", width=8, steps=3)
    >>> with lo.trace(loop) as seen:
    ...     _ = loop(torch.randn(1, 2, 8), torch.tanh)
    >>> len(seen.state), len(seen.read), seen.step_size[0].shape
    (4, 3, torch.Size([1, 2, 1, 1]))
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"trace takes a module, got {type(module).__name__}")
    loops = [m for m in module.modules() if isinstance(m, Loop)]
    if not loops:
        raise ValueError(f"there is no looptim.Loop inside this {type(module).__name__}: nothing to trace")
    seen = Trace()
    handles = [loop.register_forward_pre_hook(_observe_with(seen), with_kwargs=True) for loop in loops]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _observe_with(seen: Trace):
    """A hook that gives each call of a loop its own observer."""

    def hook(loop: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        first, outer = True, kwargs.get("observe")

        def observe(transition: Transition, record: Record) -> None:
            nonlocal first
            if first:
                seen.state.append(record.ctx.Y)
                first = False
            seen.state.append(record.Y)
            seen.read.append(record.o)
            seen.target.append(record.t)
            seen.step_size.append(torch.as_tensor(record.carry.eta))
            lam = record.carry.lam
            seen.decay.append(lam.matrix if isinstance(lam, StreamMatrix) else torch.as_tensor(lam))
            seen.input_map.append(record.H)
            seen.write_map.append(record.x)
            seen.objective.append(transition.objective.value(record.o, record.t))
            if outer is not None:
                outer(transition, record)

        return args, {**kwargs, "observe": observe}

    return hook
