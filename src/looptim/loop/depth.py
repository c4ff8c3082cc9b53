"""How deep a call of a loop goes: how many steps it runs, and which tokens take each of them."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from ..base.choices import choose
from .signals import Signal, find_signal
from .walk import Decode, ExitWalk, Live, Walk

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from .loop import Loop
    from .transition import Record


class Depth(ABC):
    """A policy for how many steps a call runs at most, and which tokens take each step. It keeps nothing between calls.

    A token that does not take a step keeps its state and whatever its rule carries. Sequences may start late, and
    tokens may leave early.
    """

    leaves: ClassVar[bool] = False
    """Whether tokens may leave before the last step."""

    @property
    def needs_record(self) -> bool:
        """Whether `live` reads the records of steps; if not, a loop may run its transitions in forms that make none."""
        return False

    @property
    def reads(self) -> tuple[int, ...]:
        """The steps after which the state is also read out, besides the last; for intermediate supervision."""
        return ()

    @property
    def by_place(self) -> bool:
        """Whether the policy depends on the positions of tokens, so that it must be told which ones a call has."""
        return False

    @property
    def through_coda(self) -> bool:
        """Whether it looks at predictions through the coda, which is then visited after every step."""
        return False

    @abstractmethod
    def count_steps(self, loop: Loop, batch: int) -> int:
        """The number of steps the loop runs at most for `batch` sequences; a ValueError if it cannot run that many."""

    @abstractmethod
    def live(
        self, step: int, total: int, last: Bool[Tensor, "B ..."] | bool | None, record: Record | None
    ) -> Bool[Tensor, "B ..."] | bool:
        """The tokens that take `step` of `total`: a mask over sequences (B,) or tokens (B, T), or True for all.

        False ends the loop before the step. `last` is the answer for the step before and `record`, for a policy that
        needs it, what that step computed; both are None before the first.
        """

    def begin(self, loop: Loop, e: Tensor, decode: Decode | None = None) -> Walk:
        """Start one call of `loop` under this policy; `decode` turns what the loop returns into logits."""
        return Walk(self, loop, e, decode)

    def part(self, first: int, length: int) -> Depth:
        """The policy for `length` tokens starting at position `first`, if it depends on positions."""
        return self


@final
@dataclass(frozen=True)
class Fixed(Depth):
    """Every token takes `steps` steps. A loop with loop-specific transitions runs its own number only.

    >>> import looptim as lo
    >>> loop = lo.build("vanilla", width=8, steps=3)
    >>> loop(torch.ones(1, 2, 8), lambda o: 2 * o, depth=Fixed(5))[0, 0, 0].item()
    32.0
    """

    steps: int
    reads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_whole("steps", self.steps)
        if not all(1 <= read < self.steps for read in self.reads):
            raise ValueError(f"reads must be steps from 1 to {self.steps - 1}, all before the last, got {self.reads}")

    def count_steps(self, loop: Loop, batch: int) -> int:
        return len(loop.schedule(self.steps))

    def live(self, step: int, total: int, last: Live | None, record: Record | None) -> bool:
        return True


@final
@dataclass(frozen=True, eq=False)
class PerSequence(Depth):
    """Every sequence takes its own number of steps; the loop's transition must be shared by all steps.

    All sequences end together, after the largest of `counts` or after `total`; a sequence with fewer steps waits at the
    start.

    >>> import looptim as lo
    >>> loop = lo.build("vanilla", width=8, steps=3)
    >>> loop(torch.ones(2, 1, 8), lambda o: 2 * o, depth=PerSequence([1, 4]))[:, 0, 0].tolist()
    [2.0, 16.0]
    """

    counts: Int[Tensor, " B"] | Sequence[int]
    total: int | None = None
    longest: int = field(init=False)
    """The number of steps a call runs, found here because a compiled loop cannot look into `counts`."""

    def __post_init__(self) -> None:
        counts = _whole_numbers(self.counts, 1, "one per sequence")
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "longest", max(int(counts.max()), self.total or 0))

    def count_steps(self, loop: Loop, batch: int) -> int:
        if not loop.shared:
            raise ValueError(f"{loop.name} has loop-specific parameters and cannot run a number of steps per sequence")
        if len(self.counts) != batch:
            raise ValueError(f"counts has {len(self.counts)} numbers of steps, but the batch has {batch} sequences")
        return self.longest

    def live(self, step: int, total: int, last: Live | None, record: Record | None) -> Tensor:
        assert isinstance(self.counts, Tensor)
        return self.counts >= total - step


@final
@dataclass(frozen=True, eq=False)
class PerToken(Depth):
    """Every token takes its own number of first steps and leaves: recorded depths that are replayed, or an oracle's.

    >>> import looptim as lo
    >>> loop = lo.build("vanilla", width=8, steps=3)
    >>> loop(torch.ones(1, 3, 8), lambda o: 2 * o, depth=PerToken([[1, 3, 2]]))[0, :, 0].tolist()
    [2.0, 8.0, 4.0]
    """

    leaves: ClassVar[bool] = True
    by_place: ClassVar[bool] = True

    counts: Int[Tensor, "B T"] | Sequence[Sequence[int]]
    maximum: int | None = None
    """The steps of the loop as it is unrolled, for one that is not run as its layout says."""
    mode: Literal["end", "mask"] = "end"
    """That of `Exit`."""
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        choose("mode", self.mode, dict.fromkeys(("end", "mask")))
        counts = _whole_numbers(self.counts, 2, "one per token, (B, T)")
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "longest", int(counts.max()))

    def count_steps(self, loop: Loop, batch: int) -> int:
        if len(self.counts) != batch:
            raise ValueError(f"counts is for {len(self.counts)} sequences, but the batch has {batch}")
        total = loop.steps if self.maximum is None else self.maximum
        _check_leaving(loop, total, repeat_last=self.maximum is not None)
        if self.longest > total:
            raise ValueError(f"counts asks for {self.longest} steps, but {loop.name} runs {total}; give maximum")
        return total

    def live(self, step: int, total: int, last: Live | None, record: Record | None) -> Live:
        assert isinstance(self.counts, Tensor)
        return self.counts > step if step < self.longest or self.mode == "mask" else False

    def begin(self, loop: Loop, e: Tensor, decode: Decode | None = None) -> Walk:
        assert isinstance(self.counts, Tensor)
        if self.counts.shape[1] != e.shape[1]:
            raise ValueError(f"counts has {self.counts.shape[1]} tokens, but the input has {e.shape[1]}")
        return super().begin(loop, e, decode)

    def part(self, first: int, length: int) -> PerToken:
        assert isinstance(self.counts, Tensor)
        counts = self.counts[:, first : first + length]
        if counts.shape[1] != length:
            raise ValueError(f"counts has {self.counts.shape[1]} tokens, but token {first + length} is asked for")
        return PerToken(counts, self.maximum, self.mode)


@final
@dataclass(frozen=True, eq=False)
class Exit(Depth):
    """A token leaves `patience` steps after its signal is first below `threshold`, counted from step `minimum` on.

        tau_i = patience + min {l >= minimum: s_{l,i} < threshold},  at most `maximum`

    From then on its state is frozen. In a model, the visits it skips see the keys and values of its last visit, and the
    read-out is of the frozen state; see docs/depth.md. With threshold 0 no token leaves, with infinity every token
    does.

    >>> import looptim as lo
    >>> loop = lo.build("operloop", width=8, steps=3)
    >>> h, state = loop(torch.randn(1, 5, 8), torch.tanh, depth=Exit("residual", math.inf), return_state=True)
    >>> state.depth.tolist()
    [[1, 1, 1, 1, 1]]
    """

    leaves: ClassVar[bool] = True

    signal: str | Signal = "residual"
    threshold: float = 0.05
    minimum: int = 1
    maximum: int | None = None
    """The number of steps a token takes at most; None for the loop's own number."""
    repeat_last: bool = False
    """Whether loop-specific transitions may run more steps than they were built for, by repeating the last one."""
    prompt: int = 0
    """The first so many places of every sequence take all steps: prefill at full depth. Padding on the left counts."""
    mode: Literal["end", "mask", "compact"] = "end"
    """`end`: the loop ends when nobody is left. `mask`: it runs all its steps, for one graph, or weights that are
    sharded. `compact`: sequences in which nobody is left also leave the batch; the host waits for a GPU to tell."""
    patience: int = 0
    """How many steps more a token takes once its signal is below the threshold."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "signal", find_signal(self.signal))
        given = self.threshold
        if isinstance(given, bool) or not isinstance(given, int | float) or math.isnan(given) or given < 0:
            raise ValueError(f"threshold must be a number of at least 0, got {given!r}")
        _check_whole("minimum", self.minimum)
        if self.maximum is not None:
            _check_whole("maximum", self.maximum)
            if self.minimum > self.maximum:
                raise ValueError(f"minimum ({self.minimum}) must not exceed maximum ({self.maximum})")
        for name, unit in (("prompt", "tokens"), ("patience", "steps")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number of {unit}, got {value!r}")
        choose("mode", self.mode, dict.fromkeys(("end", "mask", "compact")))

    @property
    def needs_record(self) -> bool:
        # No token leaves at a threshold of 0, so the loop runs as it does without exits.
        return self.threshold > 0

    @property
    def by_place(self) -> bool:
        return self.prompt > 0

    @property
    def through_coda(self) -> bool:
        assert isinstance(self.signal, Signal)
        return self.signal.asks == "coda"

    def count_steps(self, loop: Loop, batch: int) -> int:
        total = loop.steps if self.maximum is None else self.maximum
        if self.minimum > total:
            raise ValueError(f"minimum ({self.minimum}) must not exceed the {total} steps of {loop.name}")
        _check_leaving(loop, total, repeat_last=self.repeat_last)
        return total

    def live(self, step: int, total: int, last: Live | None, record: Record | None) -> Live:
        raise AssertionError("Exit has its own walk")

    def begin(self, loop: Loop, e: Tensor, decode: Decode | None = None) -> ExitWalk:
        return ExitWalk(self, loop, e, decode)

    def part(self, first: int, length: int) -> Exit:
        return dataclasses.replace(self, prompt=max(self.prompt - first, 0)) if self.prompt else self

    def __str__(self) -> str:
        """The words by which an evaluation records this policy."""
        assert isinstance(self.signal, Signal)
        bounds = f"minimum {self.minimum}, maximum {self.maximum or 'as the layout says'}"
        beyond = ", the last transition repeats" if self.repeat_last else ""
        prefill = f", the first {self.prompt} tokens at full depth" if self.prompt else ", prefill with exits"
        later = f", {self.patience} more" if self.patience else ""
        return f"{self.signal.name} < {self.threshold:g}{later}, {bounds}{beyond}{prefill}"


def parse_depth(text: str) -> Depth:
    """Parse a number of loops, or SIGNAL[+PATIENCE]:THRESHOLD[:MINIMUM[:MAXIMUM[:repeat]]], from the command line.

    >>> parse_depth("4").steps
    4
    >>> str(parse_depth("residual:0.05:2"))
    'residual < 0.05, minimum 2, maximum as the layout says, prefill with exits'
    >>> parse_depth("residual+1:0.05").patience
    1
    >>> parse_depth("residual:0.05:1:8:repeat").repeat_last
    True
    """
    name, *numbers = text.split(":")
    if not numbers and name.removeprefix("-").isdecimal():
        return Fixed(int(name))
    repeats = numbers[3:] == ["repeat"]
    try:
        threshold, *bounds = numbers[: 3 if repeats else None]
        minimum, maximum = [*bounds, *["1", ""][len(bounds) :]]
        values = float(threshold), int(minimum), int(maximum) if maximum else None
        signal, _, patience = name.partition("+")
        more = int(patience or 0)
    except ValueError:
        raise ValueError(
            f"depth {text!r} does not parse; give a number of loops, or a signal and its threshold, as in residual:0.05"
        ) from None
    return Exit(signal, *values, repeat_last=repeats, patience=more)


def _check_leaving(loop: Loop, total: int, *, repeat_last: bool) -> None:
    """Raise a ValueError if tokens cannot leave one by one, or if the loop cannot run this many steps."""
    if any(getattr(part, "mixes_tokens", False) for part in loop.modules()):
        raise ValueError(
            f"{loop.name} reads the state of the token before, which may have left the loop; choose a transition "
            "without token_shift, or a depth that is the same for all tokens"
        )
    if not loop.shared and total > loop.steps and not repeat_last:
        raise ValueError(
            f"{loop.name} has loop-specific parameters for {loop.steps} steps, and maximum is {total}; lower it, or "
            "let its last transition go on: repeat_last=True, or :repeat behind the maximum on the command line"
        )


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _whole_numbers(counts: Any, dim: int, each: str) -> Tensor:
    tensor = torch.as_tensor(counts)
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.dim() != dim or not tensor.numel() or not whole or not (tensor >= 1).all():
        raise ValueError(f"counts must be whole numbers of at least 1, {each}, got {counts}")
    return tensor
