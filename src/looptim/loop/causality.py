"""Numerical checks that no token's state depends on a later token or on another sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import final

import torch
from torch import Tensor, nn

from .facts import Fact, observed
from .far import find_far_leak
from .loop import Loop
from .memory import find_memory, state_of
from .probe import (
    ACROSS,
    AGAIN,
    LATER,
    SAME,
    alone,
    changed_copy,
    check_held,
    first_line,
    float64_copy,
    loops_of,
    name_of,
    on_cpu,
    random_blocks,
    random_input,
    wanting_gradient,
)

TOLERANCE = 1e-9
"""Largest relative change that counts as rounding; runs are in float64."""
ROWS, TOKENS = 6, 7
"""Shape of the probing input: one sequence per place to cut, and sizes that no other axis is likely to have."""
SEEDS = 12
"""Number of runs, with different seeds, for parts that draw random numbers in training."""
FAR = ((1, -1.0), (1, 20.0), (2, 3000.0), (2, -3000.0), (3, 20.0), (3, -20.0))
"""Seeds and scales of further parameter changes, since a gate may open to one side only, or late."""


def check_causality(module: nn.Module, *, vocab_size: int | None = None) -> float:
    """Raise, naming the part, if a token sees a later token of its sequence or another sequence.

    The check changes later tokens, then drops them, and does the same to other sequences. It compares everything that
    each part computed at the earlier tokens: features, bias, read, target, objective, write, step size, decay, memory,
    state and read-out. It does so in float64, in training and in eval mode, at the module's own parameters and at
    randomly changed ones, with several seeds for parts that draw random numbers, and in fp32 with long sequences, with
    many sequences, and with tokens of all sizes. Equal inputs must give equal outputs, since nothing may be remembered.
    `module` is a `Loop`, or a model that contains loops, takes tokens (B, T), and has a `config` or is given a
    `vocab_size`. Returns the largest relative change, which is rounding.

    >>> import looptim as lo
    >>> lo.check_causality(lo.build("operloop", width=8, steps=3)) < 1e-9
    True
    """
    found, worst = find_leak(module, vocab_size=vocab_size)
    if found is not None:
        raise ValueError(found)
    return worst


def find_leak(module: nn.Module, *, vocab_size: int | None = None) -> tuple[str | None, float]:
    """The message of `check_causality` about the first leak, or None, and the largest relative change."""
    found, change = find_small_leak(module, vocab_size=vocab_size)
    far = (find_far_leak(loop) for loop in loops_of(module))
    return (found or next(filter(None, far), None)), change


def find_small_leak(module: nn.Module, *, vocab_size: int | None = None) -> tuple[str | None, float]:
    """The same for short sequences, where the values of every part are compared."""
    worst = 0.0
    with on_cpu():
        for what, part, change in _compare_all(module, vocab_size):
            if part is not None:
                size = f"by {change:.2g}, relative"
                return f"{name_of(module)} {what}: {part} gives {SAME[what]} other values ({size})", change
            worst = max(worst, change)
    return None, worst


def _compare_all(module: nn.Module, vocab_size: int | None) -> Iterator[tuple[str, str | None, float]]:
    for twin in _twins(module):
        probe = _Probe(twin, vocab_size)
        check_held(module, twin, probe.output)
        yield from probe.compare()
    # With far-changed parameters, or parameters changed the other way, a gate that starts closed may be open.
    for seed, scale in FAR:
        twin = changed_copy(module, (scale, scale / 10, scale / 300), seed=seed)
        if twin is not None:
            yield from _Probe(twin.train(seed > 1), vocab_size).compare_briefly()


def mixes_tokens(loop: Loop) -> bool:
    """Whether, inside the loop, a token reads an earlier token's state, which no KV cache holds.

    This is found by changing the first token, at the module's own parameters and at changed ones. On the meta device,
    which has no values, it relies on what the parts declare about themselves.

    >>> import looptim as lo
    >>> mixes_tokens(lo.build("full_bandwidth", width=8, steps=2, token_shift=True))
    True
    """
    said = any(getattr(part, "mixes_tokens", False) for part in loop.modules())
    if said or any(tensor.is_meta for tensor in (*loop.parameters(), *loop.buffers())):
        return said
    with on_cpu():
        later = (torch.arange(TOKENS) > 0).expand(ROWS, TOKENS)
        probes = (_Probe(twin, None) for twin in _twins(loop))
        return any(p.change(_mix(later, p.given, p.others[0]), later)[0] is not None for p in probes)


def _twins(module: nn.Module) -> Iterator[nn.Module]:
    """Copies to run: in eval and training mode, at the module's own parameters and at slightly changed ones."""
    if not loops_of(module):
        raise ValueError(f"check_causality takes a Loop or a model that contains one, got {type(module).__name__}")
    own = float64_copy(module)
    yield own
    yield own.train()
    near = changed_copy(module)
    if near is not None:
        yield near.train()


@final
class _Probe:
    """A module with an input, and everything its parts computed for that input."""

    def __init__(self, module: nn.Module, vocab_size: int | None):
        self.module = module
        self.generator = torch.Generator("cpu").manual_seed(2)
        if isinstance(module, Loop):
            self.blocks = random_blocks(module.width)
            self.given = random_input(module.width, ROWS, TOKENS)
            self.others = [self.given.flip(-1) + 1, -100 * self.given, torch.zeros_like(self.given)]
        else:
            size = vocab_size or getattr(getattr(module, "config", None), "vocab_size", None)
            if size is None:
                raise ValueError(f"{name_of(module)} has no config with a vocab_size; pass vocab_size")
            self.given, *self.others = torch.randint(size, (4, ROWS, TOKENS), generator=self.generator).unbind()
        self.draws = False
        """Whether anything random was drawn."""
        self.facts = self.run(self.given)

    def compare(self) -> Iterator[tuple[str, str | None, float]]:
        """What was changed, the first part that wrongly reacted, and how large the change is."""
        everywhere = torch.ones(ROWS, TOKENS, dtype=torch.bool)
        state = state_of(self.module)
        yield AGAIN, *self.change(self.given, everywhere)
        # Sequence n is cut after n + 1 tokens, so that one run covers every cut.
        before = torch.arange(TOKENS) < torch.arange(1, ROWS + 1).unsqueeze(-1)
        for bit in range(ROWS.bit_length()):
            chosen = (torch.arange(ROWS) >> bit) % 2 == 0
            for rows in (chosen, ~chosen):
                mine = rows.unsqueeze(-1).expand(ROWS, TOKENS)
                yield ACROSS, *self.change(_mix(mine, self.given, self.others[bit % 3]), mine)
        for other in self.others:
            yield LATER, *self.change(_mix(before, self.given, other), before)
        self._go_back()
        yield AGAIN, *self.change(self.given, everywhere)
        self.module.zero_grad()
        yield AGAIN, *find_memory(state, state_of(self.module))
        for seed in range(1, SEEDS) if self.draws else ():
            yield LATER, *self.change(_mix(before, self.given, self.others[seed % 3]), before, seed=seed)
        yield from self._leave_out()

    def compare_briefly(self) -> Iterator[tuple[str, str | None, float]]:
        """A shorter version of `compare`, for parameters that are one choice of many."""
        before = torch.arange(TOKENS) < torch.arange(1, ROWS + 1).unsqueeze(-1)
        mine = (torch.arange(ROWS) % 2 == 0).unsqueeze(-1).expand(ROWS, TOKENS)
        yield LATER, *self.change(_mix(before, self.given, self.others[0]), before)
        yield ACROSS, *self.change(_mix(mine, self.given, self.others[0]), mine)
        yield from self._leave_out()

    def _go_back(self) -> None:
        """A backward pass, since a part may look at its gradients; whether it has any is asked elsewhere."""
        if self.output.requires_grad:
            with suppress(RuntimeError), torch.random.fork_rng(devices=[]):
                self.output.sum().backward()

    def _leave_out(self) -> Iterator[tuple[str, str | None, float]]:
        if self.module.training:
            # Random draws in training depend on the shape of the input, so tokens cannot be dropped there.
            return
        for length in (1, TOKENS // 2, TOKENS - 1):
            kept = (torch.arange(TOKENS) < length).expand(ROWS, TOKENS)
            yield LATER, *self._differs(self.run(self.given[:, :length]), kept)
        for row in (0, ROWS // 2, ROWS - 1):
            kept = (torch.arange(ROWS) == row).unsqueeze(-1).expand(ROWS, TOKENS)
            yield ACROSS, *self._differs(self.run(self.given[row : row + 1]), kept)

    def change(self, changed: Tensor, kept: Tensor, *, seed: int = 0) -> tuple[str | None, float]:
        """The first part whose values at the `kept` tokens change with the input."""
        given = self.facts if seed == 0 else self.run(self.given, seed=seed)
        return _first_change(given, self.run(changed, seed=seed), kept, kept)

    def _differs(self, facts: list[Fact], kept: Tensor) -> tuple[str | None, float]:
        rows, tokens = int(kept.any(1).sum()), int(kept.any(0).sum())
        return _first_change(self.facts, facts, kept, torch.ones(rows, tokens, dtype=torch.bool))

    def run(self, given: Tensor, *, seed: int = 0) -> list[Fact]:
        """Everything that the parts compute for an input, in order."""
        facts: list[Fact] = []
        is_loop = isinstance(self.module, Loop)
        # A module that checks whether gradients are on must not behave better here than in training.
        gradient = torch.enable_grad() if self.module.training else torch.no_grad()
        with gradient, alone(self.module), observed(self.module, facts):
            torch.default_generator.manual_seed(seed)
            start = torch.get_rng_state()
            try:
                output = self.module(wanting_gradient(given), self.blocks) if is_loop else self.module(given)
            except RuntimeError as error:
                raise ValueError(
                    f"{name_of(self.module)} does not run on {given.shape[0]} sequences of {given.shape[1]} tokens in "
                    f"float64 ({first_line(error)}); it must take any number of both, and create tensors in the dtype "
                    "of the input"
                ) from error
            self.draws |= not torch.equal(start, torch.get_rng_state())
        self.output = output if isinstance(output, Tensor) else output.logits
        facts.append(Fact("the read-out" if is_loop else "a block or the head", self.output))
        return [Fact(part, value.detach()) for part, value in facts]


def _mix(kept: Tensor, given: Tensor, other: Tensor) -> Tensor:
    return torch.where(kept if given.dim() == 2 else kept.unsqueeze(-1), given, other)


def _first_change(
    given: Sequence[Fact], changed: Sequence[Fact], kept: Tensor, kept_of_changed: Tensor
) -> tuple[str | None, float]:
    """The first part whose values at the kept tokens differ, and the largest relative difference up to there."""
    worst = 0.0
    for fact, other in zip(given, changed, strict=False):
        a, b = _select(fact.value, kept), _select(other.value, kept_of_changed)
        if fact.part != other.part or a.shape != b.shape:
            return fact.part, float("inf")
        change = 0.0 if torch.equal(a, b) else ((a - b).abs().max() / a.abs().mean().clamp_min(1e-300)).item()
        worst = max(worst, change)
        if not change <= TOLERANCE:
            return fact.part, change
    if len(given) != len(changed):
        return min(given, changed, key=len)[-1].part, float("inf")
    return None, worst


def _select(value: Tensor, kept: Tensor) -> Tensor:
    """The kept tokens of a tensor that has such axes, or all of a tensor that has none."""
    rows, tokens = (size == wanted for size, wanted in zip((*value.shape, 0, 0), kept.shape, strict=False))
    if rows and tokens:
        return value[kept]
    if rows:
        return value[kept.any(1)]
    return value[:, kept.any(0)] if tokens else value
