"""A loop: R transitions between a start and a read-out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from ..base.choices import choose
from .base import check_same_shape, require
from .depth import Depth, Fixed
from .fused import FORMS, form_of
from .reversible import Tape, irreversible_part
from .rules import Carry
from .state import Copies, Mean
from .transition import Record, Transition
from .waiting import merge, spread, take
from .walk import Decode, Walk

if TYPE_CHECKING:
    from jaxtyping import Float, Int


Blocks = Callable[[Tensor], Tensor]


class LoopState(NamedTuple):
    """The final state of a loop; another call may go on from it, given as its `start`."""

    Y: Tensor
    """The state, (B, T, r, d)."""
    carry: Carry
    """What the last rule carries to a next step."""
    depth: Tensor
    """How many steps each token took, (B, T)."""
    live: tuple[Tensor | bool, ...]
    """The tokens that took each step, as the `Depth` answered."""
    reads: tuple[Tensor, ...] = ()
    """What the loop would have returned after each number of steps that the `Depth` lists in `reads`."""


@final
class Loop(nn.Module):
    """R transitions between a start and a read-out (Algorithm 1, lines 3 to 15).

    One `Transition` may be shared by all steps, and then any number of steps may be run. A list of transitions is
    loop-specific, and its length is the only number of steps.

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
        normed: bool = False,
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
            raise ValueError("a shared transition needs `steps`, the number of times to apply it")
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
        self.normed = normed
        """Whether the loop's output is already normalized, so that a model that ends with it adds no norm."""
        self.name = name
        self.summary = summary
        self.reversible = False
        """Whether the states are rebuilt in the backward pass instead of kept."""

    def forward(
        self,
        e: Float[Tensor, "B T d"],
        blocks: Blocks | Sequence[Blocks],
        *,
        depth: Depth | Walk | None = None,
        start: Float[Tensor, "B T r d"] | LoopState | None = None,
        return_state: bool = False,
        grad_steps: int | None = None,
        observe: Callable[[Transition, Record], None] | None = None,
        recompute: bool = False,
    ) -> Float[Tensor, "B T d"] | tuple[Float[Tensor, "B T d"], LoopState]:
        """Loop over `e`, the prelude output. `blocks` is the shared stack, or a sequence of callables, one per step.

        `depth` says how many steps run and which tokens take them; by default all tokens take the loop's own number of
        steps. A model, whose blocks must know which tokens take the step, passes a walk that it has begun.

        `start` is a state to begin with instead of the start part's; from a `LoopState` the loop goes on after the
        steps it has taken. `return_state` also returns the last `LoopState`. `grad_steps` truncates backpropagation to
        that many last steps (Huginn, Parcae). `observe` is called with every step's transition and record; `trace` is
        built on it. `recompute` keeps little of a transition for the backward.
        """
        self._check(e, grad_steps)
        walk = depth if isinstance(depth, Walk) else self.begin(e, depth)
        if grad_steps is not None and walk.policy.leaves:
            raise ValueError(
                "grad_steps keeps the gradient of the last steps, which a token that left never took; drop it"
            )
        schedule, total = walk.schedule, walk.total
        stacks = _one_per_step(blocks, total)
        Y, carry, lived = self._start(e, start, walk)
        tape = Tape() if self.reversible else None
        record, reads = None, []
        # Who observes sees all sequences.
        walk.gathers = walk.gathers and observe is None
        for step in range(len(lived), total):
            transition = schedule[step]
            live = walk.enter(step, record)
            if live is False:
                break
            before, rows = (Y, carry), walk.rows
            seen = take(rows, Y, e, carry)
            with torch.no_grad() if grad_steps is not None and step < total - grad_steps else nullcontext():
                if observe is None and not walk.needs_record:
                    tape_here = tape if torch.is_grad_enabled() else None
                    Y, carry = transition(Y, e, stacks[step], carry, tape_here, recompute)
                else:
                    run = transition.run if observe is None else transition.step
                    record = run(seen[0], seen[1], stacks[step], seen[2])
                    Y, carry = spread(rows, len(e), record.Y, record.carry)
            if isinstance(live, Tensor):
                Y, carry = merge(live, (Y, carry), before, transition.rule)
            lived.append(live)
            if step + 1 in walk.policy.reads:
                reads.append(self.readout(Y))
            if record is not None:
                after = take(rows, Y, e, carry)
                record = record._replace(Y=after[0], carry=after[2])
                if observe is not None:
                    observe(transition, record)
        h = self.readout(Y)
        check_same_shape(h, e, "the read-out", "the loop's input")
        return (h, LoopState(Y, carry, _count(lived, e), tuple(lived), tuple(reads))) if return_state else h

    def _start(
        self, e: Tensor, start: Tensor | LoopState | None, walk: Walk
    ) -> tuple[Tensor, Carry, list[Tensor | bool]]:
        """The state and the carry to begin with, and who took the steps before."""
        went_on = isinstance(start, LoopState)
        if went_on and (not isinstance(walk.policy, Fixed) or walk.total < len(start.live)):
            raise ValueError(
                f"a state after {len(start.live)} steps goes on to a fixed depth of at least as many, not {walk.policy}"
            )
        Y = start.Y if went_on else self.start(e) if start is None else start
        if Y.dim() != 4 or Y.shape[:2] != e.shape[:2]:
            raise ValueError(
                f"the start is of shape {tuple(Y.shape)}; for an input {tuple(e.shape)} it must be a state (B, T, r, d)"
            )
        return (Y, start.carry, list(start.live)) if went_on else (Y, walk.schedule[0].rule.init(Y), [])

    def begin(self, e: Float[Tensor, "B T d"], depth: Depth | None = None, *, decode: Decode | None = None) -> Walk:
        """Start one call under `depth`, by default of all steps; `decode` turns what the loop returns into logits."""
        depth = Fixed(self.steps) if depth is None else depth
        require("depth", depth, Depth)
        return depth.begin(self, e, decode)

    def set_form(self, form: str) -> None:
        """Set how transitions of known parts run: `fused` (the default), `compiled`, or `readable`, the definition.

        >>> import looptim as lo
        >>> loop = lo.build("operloop", width=8, steps=3)
        >>> loop.set_form("readable")
        >>> loop.form
        'readable'
        """
        for transition in cast("list[Transition]", list(self.transitions)):
            transition.kernels = choose("form", form, FORMS)()

    def reverse(self) -> None:
        """Rebuild the states in the backward pass instead of keeping them. `looptim.loop.reversible` bounds the error.

        >>> import looptim as lo
        >>> loop = lo.build("operloop", width=8, steps=12)
        >>> loop.reverse()
        >>> lo.build("vanilla", width=8, steps=12).reverse()
        Traceback (most recent call last):
        ValueError: vanilla cannot rebuild its states, because of the projection Plain; leave reversible out
        """
        for transition in cast("list[Transition]", list(self.transitions)):
            part = "the readable form" if transition.kernels is None else irreversible_part(transition)
            if part is not None:
                raise ValueError(f"{self.name} cannot rebuild its states, because of {part}; leave reversible out")
        self.reversible = True

    @property
    def form(self) -> str:
        """How the transitions run, and the part that keeps them readable although another form was asked for."""
        forms = dict.fromkeys(form_of(transition) for transition in cast("list[Transition]", list(self.transitions)))
        return ", ".join(forms)

    def _check(self, e: Tensor, grad_steps: int | None) -> None:
        if not isinstance(e, Tensor) or not e.is_floating_point():
            given = e.dtype if isinstance(e, Tensor) else type(e).__name__
            raise ValueError(f"the loop takes a tensor of floating point numbers, got {given}")
        if e.dim() != 3 or e.shape[-1] != self.width:
            raise ValueError(
                f"the loop was built for inputs of shape (batch, tokens, {self.width}), got {tuple(e.shape)}"
            )
        if grad_steps is not None and grad_steps < 1:
            raise ValueError(f"grad_steps must be at least 1, got {grad_steps}; without it, all steps get a gradient")

    def schedule(self, steps: int | None = None) -> list[Transition]:
        """The transition of every step."""
        steps = self.steps if steps is None else steps
        transitions = cast("list[Transition]", list(self.transitions))
        if self.shared:
            return transitions * steps
        if steps != self.steps:
            raise ValueError(
                f"{self.name} has loop-specific parameters for {self.steps} steps and cannot run {steps}; "
                f"build it with steps={steps}, or with shared=True where the preset has it"
            )
        return transitions

    def unroll(self, steps: int) -> list[Transition]:
        """The transition of each of `steps` steps; loop-specific ones repeat the last one when they run out."""
        transitions = cast("list[Transition]", list(self.transitions))
        return (transitions + transitions[-1:] * steps)[:steps]

    def _repr_html_(self) -> str:
        # A loop's name is read off its parts by a module above this one.
        from .describe import describe

        return describe(self)._repr_html_()

    def extra_repr(self) -> str:
        return f"name={self.name!r}, steps={self.steps}, {'shared' if self.shared else 'loop-specific'}"


def _one_per_step(blocks: Blocks | Sequence[Blocks], total: int) -> list[Blocks]:
    """The blocks of every step."""
    given = list(blocks) if isinstance(blocks, (Sequence, nn.ModuleList)) else [blocks] * total
    if len(given) < total:
        raise ValueError(f"blocks are {len(given)} callables for a loop of {total} steps; give one per step, or one")
    for block in given:
        if not callable(block):
            raise ValueError(f"blocks must be a callable, or one per step, got {type(block).__name__}")
    return given


def _count(lived: list[Tensor | bool], e: Tensor) -> Int[Tensor, "B T"]:
    """How many steps every token took."""
    whole = sum(live for live in lived if isinstance(live, bool))
    count = torch.full(e.shape[:2], whole, dtype=torch.long, device=e.device)
    for live in lived:
        if isinstance(live, bool):
            continue
        count = count + (live if live.dim() == 2 else live.unsqueeze(-1))
    return count
