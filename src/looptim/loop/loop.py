"""A loop: R transitions between a start and a read-out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn

from .base import require, signature_of
from .rules import Carry
from .state import Copies, Mean
from .transition import Record, Transition, check_same_shape

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@final
class Loop(nn.Module):
    """R transitions between a start and a read-out (Algorithm 1, lines 3 to 15).

    One `Transition` is shared by all steps, and any number of steps may be asked for; a list of them is loop-specific,
    and its length is the only number of steps there is.

    >>> import looptim as lo
    >>> loop = lo.build("operloop", width=8, steps=3)
    >>> loop(torch.randn(2, 5, 8), lambda o: torch.tanh(o)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        transitions: Transition | Iterable[Transition],
        *,
        width: int,
        steps: int | None = None,
        start: nn.Module | None = None,
        readout: nn.Module | None = None,
        name: str = "custom",
        summary: str = "",
    ):
        super().__init__()
        self.shared = isinstance(transitions, Transition)
        listed = [transitions] if isinstance(transitions, Transition) else list(transitions)
        for transition in listed:
            require("a transition", transition, Transition)
        self.transitions = nn.ModuleList(listed)
        if steps is None and self.shared:
            raise ValueError("a shared transition needs `steps`, the number of times it is applied")
        self.steps = len(self.transitions) if steps is None else steps
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not self.shared and self.steps != len(self.transitions):
            raise ValueError(f"steps is {steps}, but {len(self.transitions)} loop-specific transitions were given")
        self.width = width
        self.start = Copies() if start is None else start
        self.readout = Mean() if readout is None else readout
        self.name = name
        self.summary = summary

    def forward(
        self,
        e: Float[Tensor, "B T d"],
        blocks: Callable[..., Tensor],
        *,
        steps: int | Int[Tensor, " B"] | None = None,
        total: int | None = None,
        grad_steps: int | None = None,
        observe: Callable[[Transition, Record], None] | None = None,
    ) -> Float[Tensor, "B T d"]:
        """Loop over `e`, the prelude output. `blocks(o, step)`, or `blocks(o)`, is the shared stack.

        A shared transition takes another number of `steps`, also one per sequence: all end together, after the largest
        of them or after `total`, and a sequence with fewer steps waits at its start. `grad_steps` truncates
        backpropagation to the last so many steps (Huginn, Parcae). `observe` is called with every step's transition
        and record; `trace` is built on it.
        """
        if not isinstance(e, Tensor) or not e.is_floating_point():
            given = e.dtype if isinstance(e, Tensor) else type(e).__name__
            raise ValueError(f"the loop takes a tensor of floating point numbers, got {given}")
        if e.dim() != 3 or e.shape[-1] != self.width:
            raise ValueError(
                f"the loop was built for inputs of shape (batch, tokens, {self.width}), got {tuple(e.shape)}"
            )
        if not callable(blocks):
            raise ValueError(f"blocks must be a callable, got {type(blocks).__name__}")
        if grad_steps is not None and grad_steps < 1:
            raise ValueError(f"grad_steps must be at least 1, got {grad_steps}; without it all steps have a gradient")
        wants_step = _takes_step(blocks)
        schedule = self.schedule(self.count_steps(steps, len(e), total=total))
        counts = steps.to(e.device) if isinstance(steps, Tensor) else None
        first_grad = 0 if grad_steps is None else len(schedule) - grad_steps
        Y = self.start(e)
        if Y.dim() != 4 or Y.shape[:2] != e.shape[:2]:
            raise ValueError(
                f"the start gave a state of shape {tuple(Y.shape)}; for {tuple(e.shape)} it must be (B, T, r, d)"
            )
        carry = schedule[0].rule.init(Y)
        for index, transition in enumerate(schedule):
            at_step = _at_step(blocks, index) if wants_step else blocks
            before = Y, carry
            with torch.no_grad() if index < first_grad else nullcontext():
                if observe is None:
                    record, (Y, carry) = None, transition(Y, e, at_step, carry)
                else:
                    record = transition.step(Y, e, at_step, carry)
                    Y, carry = record.Y, record.carry
            if counts is not None:
                Y, carry = _where_begun(counts >= len(schedule) - index, (Y, carry), before)
            if observe is not None and record is not None:
                observe(transition, record._replace(Y=Y, carry=carry))
        h = self.readout(Y)
        check_same_shape(h, e, "the read-out", "the loop's input")
        return h

    def count_steps(self, steps: int | Int[Tensor, " B"] | None, batch: int, *, total: int | None = None) -> int:
        """How many steps a call runs; a ValueError where this loop cannot run `steps`."""
        if not isinstance(steps, Tensor):
            return len(self.schedule(steps))
        if not self.shared:
            raise ValueError(
                f"{self.name} has loop-specific parameters and cannot run as many steps as a sequence asks"
            )
        if steps.shape != (batch,) or steps.is_floating_point() or not (steps >= 1).all():
            raise ValueError(f"steps must be {batch} whole numbers of at least 1, one per sequence, got {steps}")
        return max(int(steps.max()), total or 0)

    def schedule(self, steps: int | None = None) -> list[Transition]:
        """The transition of every step."""
        steps = self.steps if steps is None else steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")
        transitions = cast("list[Transition]", list(self.transitions))
        if self.shared:
            return transitions * steps
        if steps != self.steps:
            raise ValueError(
                f"{self.name} has loop-specific parameters for {self.steps} steps and cannot run {steps}; "
                f"build it with steps={steps}, or with shared=True where the preset has it"
            )
        return transitions

    def extra_repr(self) -> str:
        return f"name={self.name!r}, steps={self.steps}, {'shared' if self.shared else 'loop-specific'}"


def _where_begun(
    begun: Bool[Tensor, " B"], now: tuple[Tensor, Carry], before: tuple[Tensor, Carry]
) -> tuple[Tensor, Carry]:
    """The new state and carry of the sequences that have begun to loop, the old ones of the others."""
    begun = begun.reshape(-1, 1, 1, 1)
    (Y, carry), (Y_before, carry_before) = now, before

    def pick(new: Any, old: Any) -> Any:
        return torch.where(begun, new, old) if isinstance(new, Tensor) and isinstance(old, Tensor) else new

    memory, eta = pick(carry.memory, carry_before.memory), pick(carry.eta, carry_before.eta)
    return pick(Y, Y_before), carry._replace(eta=eta, memory=memory)


def _at_step(blocks: Callable[[Tensor, int], Tensor], step: int) -> Callable[[Tensor], Tensor]:
    return lambda o: blocks(o, step)


def _takes_step(blocks: Callable[..., Tensor]) -> bool:
    """Whether `blocks` wants the step as its second argument; an `nn.Linear` or a lambda of one argument does not."""
    function = blocks.forward if isinstance(blocks, nn.Module) else blocks
    try:
        parameters = signature_of(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    second = positional[1] if len(positional) > 1 else None
    if second is None:
        # A module that takes anything is a wrapper, of torch.compile or DDP: what it wraps knows.
        inner = getattr(blocks, "_orig_mod", None) or getattr(blocks, "module", None)
        if isinstance(blocks, nn.Module) and not positional and callable(inner):
            return _takes_step(cast(Any, inner))
        # `forward(x, *args)`, as of PEFT's layers, passes on what it is given to one that may not want it.
        return not positional and any(p.kind is p.VAR_POSITIONAL for p in parameters)
    # An optional second argument of another name is something else, the mask of a torch layer for instance.
    return second.name == "step" or second.default is second.empty
