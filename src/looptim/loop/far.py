"""Numerical checks of what a loop sees where it is large: long sequences, many of them, deep loops, fp32 and bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .depth import Fixed
from .facts import Fact, observed
from .loop import Loop
from .probe import ACROSS, LATER, SAME, alone, copied, on_cpu, random_blocks, random_input, wanting_gradient

ROUNDING = (1e-4, 0.05)
"""Largest relative change that counts as rounding, in fp32 and in bf16."""
ELEMENTS = 2**20
"""The largest input that is run."""
MANY = (512, 3)
"""Shape of an input that samples many tokens: of a sequence, only the last unchanged one can see the next."""
SHAPES = ((64, 256), (2, 2048), (1, 256), MANY)
"""Shapes of inputs, since a leak may reach far, or be at the borders of chunks only, or in a sequence alone."""
DEEPER = 4
"""How many times its own number of steps a shared transition is also run, since more steps may be asked for later."""


def find_leak_at(loop: Loop, rows: int, tokens: int, *, steps: int | None = None, bf16: bool = False) -> str | None:
    """What a loop wrongly sees when it runs as in training: in that shape, with that many steps, in fp32 or bf16.

    Its tokens have sizes from 0.01 to 100, since those of a trained model are not known; some are zero, and some are
    the same as the one before. It runs in training mode, and then as in generation.
    """
    tokens = max(2, min(tokens, ELEMENTS // (2 * loop.width)))
    rows = max(1, min(rows, ELEMENTS // (tokens * loop.width)))
    with on_cpu():
        e, blocks = _tokens(loop.width, rows, tokens), random_blocks(loop.width)
        before = torch.arange(tokens) < _cuts(rows, tokens).unsqueeze(-1)
        rest = [(ACROSS, mine.unsqueeze(-1).expand(rows, tokens)) for mine in _halves(rows)]
    twin = copied(loop, torch.float32)
    depth = None if steps is None else Fixed(steps)

    def output(given: Tensor) -> Tensor:
        mode = torch.enable_grad() if twin.training else torch.inference_mode()
        with mode, on_cpu(), alone(loop), torch.autocast("cpu", torch.bfloat16, bf16):
            torch.default_generator.manual_seed(0)
            return twin(wanting_gradient(given), blocks, depth=depth).detach().float()

    for training in (True, False):
        twin.train(training)
        given = output(e)
        for what, kept in [*rest[0 if training else -1 :], (LATER, before)]:
            changed = torch.where(kept.unsqueeze(-1), e, e.flip(-1) + 1)
            change = _change(given[kept], output(changed)[kept])
            if not change <= ROUNDING[bf16]:
                many = f"among {rows} sequences of {tokens} tokens" if rows > 1 else f"in a sequence of {tokens} tokens"
                when = "" if training else ", outside of training,"
                part = _first(twin, output, (e, changed), kept) or "a part"
                size = f"by {change:.2g}, relative"
                return f"{loop.name} {what}: {many}{when} {part} gives {SAME[what]} other values ({size})"
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
    """What a loop sees in one of several shapes, and in more steps than its own."""
    found: Iterator[str | None] = (find_leak_at(loop, *shape) for shape in SHAPES)
    deeper = find_leak_at(loop, *MANY, steps=DEEPER * loop.steps) if loop.shared else None
    return next(filter(None, found), deeper)
