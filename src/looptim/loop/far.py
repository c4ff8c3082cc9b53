"""Numerical checks of what a loop sees where it is large: long sequences, many of them, deep loops, fp32 and below."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .depth import Fixed
from .facts import Fact, observed
from .loop import Loop
from .probe import ACROSS, LATER, SAME, alone, copied, first_line, on_cpu, random_blocks, random_input, wanting_gradient

ROUNDING = (1e-4, 0.05)
"""Largest relative change that counts as rounding, in fp32 and in 16 bits."""
ELEMENTS = 2**20
"""The largest input that is run."""
MANY = (512, 3)
"""Shape of an input that samples many tokens: of a sequence, only the last unchanged one can see the next."""
SHAPES = ((64, 256), (2, 2048), (1, 256), (3, 1000), (100, 20))
"""Shapes of inputs, since a leak may reach far, or be at the borders of chunks only, or in a sequence alone."""
USUAL = (24, 40)
"""Shape of the input that is run in every way."""
DEEPER = 4
"""How many times its own number of steps a shared transition is also run, since more steps may be asked for later."""
LOUD = 1000
"""How many times larger tokens are also tried, since some of a pretrained model's are."""


class CannotRunError(ValueError):
    """A loop does not take an input of this shape."""


class Way(NamedTuple):
    """A mode in which a loop may be run; a part can ask for it, and do something else there."""

    said: str = ""
    training: bool = True
    gradients: Callable[[], AbstractContextManager] = torch.enable_grad
    frozen: bool = False
    """Whether what comes into the loop has no gradient, as where only the loop is trained."""
    dtype: torch.dtype = torch.float32
    autocast: bool = False

    @property
    def rounding(self) -> float:
        return ROUNDING[self.autocast or self.dtype != torch.float32]


TRAINING = Way()
GENERATION = Way(" outside of training,", training=False, gradients=torch.inference_mode)
OTHER_WAYS = (
    Way(" after frozen layers,", frozen=True),
    Way(" in training mode without gradients,", gradients=torch.no_grad),
    Way(" outside of training,", training=False, gradients=torch.no_grad),
    Way(" outside of training, with gradients,", training=False),
    Way(" outside of training, with gradients, after frozen layers,", training=False, frozen=True),
    Way(" under autocast,", autocast=True),
    Way(" outside of training, under autocast,", training=False, gradients=torch.inference_mode, autocast=True),
    Way(" in bf16,", dtype=torch.bfloat16),
    Way(" outside of training, in bf16,", training=False, gradients=torch.inference_mode, dtype=torch.bfloat16),
    Way(" outside of training, in fp16,", training=False, gradients=torch.inference_mode, dtype=torch.float16),
)


def find_leak_at(
    loop: Loop,
    rows: int,
    tokens: int,
    *,
    steps: int | None = None,
    ways: tuple[Way, ...] = (TRAINING, GENERATION),
    size: float = 1.0,
) -> str | None:
    """What a loop wrongly sees in that shape, with that many steps, by default as in training and as in generation.

    Its tokens have sizes from 0.01 to 100 times `size`, since those of a trained model are not known; some are zero,
    and some are the same as the one before.
    """
    tokens = max(2, min(tokens, ELEMENTS // (2 * loop.width)))
    rows = max(1, min(rows, ELEMENTS // (tokens * loop.width)))
    with on_cpu():
        e = size * _tokens(loop.width, rows, tokens)
        before = torch.arange(tokens) < _cuts(rows, tokens).unsqueeze(-1)
        masks = [(ACROSS, mine.unsqueeze(-1).expand(rows, tokens)) for mine in _halves(rows)] + [(LATER, before)]
    depth = None if steps is None else Fixed(steps)
    # Generation has the same parts as training, so it gets one mask for sequences instead of three.
    found = (_find_leak(loop, e, masks[0 if way.training else -2 :], way, depth) for way in ways)
    return next(filter(None, found), None)


def _find_leak(loop: Loop, e: Tensor, masks: list[tuple[str, Tensor]], way: Way, depth: Fixed | None) -> str | None:
    """What a loop wrongly sees in one way of running it: of each mask, the tokens that must stay as they are."""
    twin = copied(loop, way.dtype).train(way.training)
    blocks = random_blocks(loop.width)
    rows, tokens = e.shape[:2]

    def output(given: Tensor) -> Tensor:
        given = given.to(way.dtype)
        with way.gradients(), on_cpu(), alone(loop), torch.autocast("cpu", torch.bfloat16, way.autocast):
            torch.default_generator.manual_seed(0)
            try:
                return twin(given if way.frozen else wanting_gradient(given), blocks, depth=depth).detach().float()
            except (RuntimeError, IndexError) as error:
                raise CannotRunError(
                    f"{loop.name} does not run{way.said} on {rows} sequences of {tokens} tokens ({first_line(error)})"
                ) from error

    given = output(e)
    for what, kept in masks:
        changed = torch.where(kept.unsqueeze(-1), e, e.flip(-1) + 1)
        change = _change(given[kept], output(changed)[kept])
        if not change <= way.rounding:
            many = f"among {rows} sequences of {tokens} tokens" if rows > 1 else f"in a sequence of {tokens} tokens"
            part = _first(twin, output, (e, changed), kept) or "a part"
            size = f"by {change:.2g}, relative"
            return f"{loop.name} {what}: {many}{way.said} {part} gives {SAME[what]} other values ({size})"
    return None


def _first(twin: Loop, run: Callable[[Tensor], Tensor], given: tuple[Tensor, Tensor], kept: Tensor) -> str | None:
    """The first part whose values at the kept tokens differ."""
    seen: list[list[Fact]] = []
    for each in given if given[0].numel() * twin.steps < ELEMENTS else ():
        facts: list[Fact] = []
        with observed(twin, facts):
            run(each)
        seen.append(facts)
    for fact, other in zip(*seen, strict=False) if seen else ():
        a, b = fact.value, other.value
        if a.shape[:2] == b.shape[:2] == kept.shape and not _change(a[kept].detach(), b[kept].detach()) <= ROUNDING[0]:
            return fact.part
    return None


def _tokens(width: int, rows: int, tokens: int) -> Tensor:
    """Tokens of all sizes, of which some are zero or repeat the one before."""
    generator = torch.Generator("cpu").manual_seed(4)
    e = 10 ** (4 * torch.rand(rows, tokens, 1, generator=generator) - 2) * random_input(width, rows, tokens).float()
    kind = torch.rand(rows, tokens, 1, generator=generator)
    e = torch.where(kind < 0.03, torch.zeros(()), e)
    return torch.where(kind > 0.9, e.roll(1, 1), e)


def _cuts(rows: int, tokens: int) -> Tensor:
    """After how many tokens each sequence is cut: half at multiples of large powers of two, as chunks end there."""
    even = sorted(range(1, tokens), key=lambda cut: -(cut & -cut))[: rows // 2]
    spread = torch.linspace(tokens - 1, 1, rows - len(even)).long()
    return torch.cat([spread, torch.tensor(even, dtype=torch.long), spread])[:rows]


def _halves(rows: int) -> list[Tensor]:
    """Masks of sequences: of any two that are paired in a simple way, one mask has one alone."""
    if rows == 1:
        return []
    every_second = torch.arange(rows) % 2 == 0
    drawn = torch.randperm(rows, generator=torch.Generator("cpu").manual_seed(5)) < (rows + 1) // 2
    return [every_second, ~every_second, drawn]


def _change(a: Tensor, b: Tensor) -> float:
    """The largest change, relative to the mean; what is not finite in both is the same."""
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    scale = a[a.isfinite()].abs().mean().nan_to_num(0.0).clamp_min(1e-30)
    return ((a - b).masked_fill(same, 0.0).abs().max() / scale).item()


def find_far_leak(loop: Loop) -> str | None:
    """What a loop sees in one of several shapes and ways, and in more steps than its own; what cannot run sees nothing.

    A part may have a longest sequence, or use what there is not in 16 bits.
    """
    more = DEEPER * loop.steps if loop.shared else None
    runs: list[tuple[tuple[int, int], dict[str, Any]]] = [(shape, {}) for shape in (*SHAPES, MANY)]
    runs += [(MANY, {"size": LOUD}), *([(MANY, {"steps": more})] if more else [])]
    runs += [(USUAL, {"ways": (way,)}) for way in (TRAINING, GENERATION, *OTHER_WAYS)]
    for shape, how in runs:
        with suppress(CannotRunError):
            found = find_leak_at(loop, *shape, **how)
            if found is not None:
                return found
    return None
