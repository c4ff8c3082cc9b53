"""One call of a loop under a policy; what it remembers from step to step is forgotten with the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .signals import Seen, Signal

if TYPE_CHECKING:
    from jaxtyping import Bool

    from .depth import Depth, Exit
    from .loop import Loop
    from .transition import Record

Live = Tensor | bool
"""The tokens that take a step: a mask over sequences (B,) or tokens (B, T), True for all, False for none."""
Decode = Callable[[Tensor], Tensor]
"""A function from what a loop returns to logits."""


class Walk:
    """One call of a loop under a policy, with everything remembered from step to step."""

    def __init__(self, policy: Depth, loop: Loop, e: Tensor, decode: Decode | None):
        self.policy, self.loop, self.decode, self.device, self.batch = policy, loop, decode, e.device, len(e)
        self.total = policy.count_steps(loop, len(e))
        self.schedule = loop.unroll(self.total)
        self.live: Live = True
        """Who takes the step that is running."""
        self.gathers = False
        """Whether steps are run by the sequences alone in which somebody is inside."""
        self.rows: Tensor | None = None
        """These sequences, by number; None for all."""
        self.begun = False

    @property
    def needs_record(self) -> bool:
        return self.policy.needs_record

    def enter(self, step: int, record: Record | None) -> Live:
        """The tokens that take `step`, given the results of the step before; False ends the loop."""
        live = self.policy.live(step, self.total, self.live if self.begun else None, record)
        self.live, self.begun = live.to(self.device) if isinstance(live, Tensor) else live, True
        return self.live


@final
class ExitWalk(Walk):
    """A call under an `Exit`: it tracks which tokens are still inside and what the signal remembers."""

    def __init__(self, policy: Exit, loop: Loop, e: Tensor, decode: Decode | None):
        super().__init__(policy, loop, e, decode)
        assert isinstance(policy.signal, Signal)
        if policy.signal.asks in ("logits", "coda") and decode is None:
            raise ValueError(
                f"the signal {policy.signal.name} looks at predictions, which take a model's head; "
                "choose residual, change or acceleration, or run it in a LoopedLM"
            )
        self.exit, self.signal, self.memory = policy, policy.signal, None
        self.gathers = policy.mode == "compact"
        everyone = torch.ones(e.shape[:2], dtype=torch.bool, device=e.device)
        self.unsettled = (everyone,) * (policy.patience + 1)
        """Whose signal has not been below the threshold yet: `patience` steps ago, ..., now."""
        self.places = torch.arange(e.shape[1], device=e.device) < policy.prompt if policy.prompt else None
        self.someone = _Someone(e.device)

    @property
    def inside(self) -> Tensor:
        """The tokens that are inside, (B, T)."""
        return self.unsettled[0]

    def enter(self, step: int, record: Record | None) -> Live:
        if record is not None and self.exit.threshold > 0:
            self.live = self._who_stays(step, record)
        return self.live

    def _who_stays(self, step: int, record: Record) -> Live:
        asks, loop = self.signal.asks, self.loop
        hidden = None if asks == "record" else loop.readout(record.Y)
        decode = self.decode if asks in ("logits", "coda") else None
        logits = decode(hidden) if decode is not None and hidden is not None else None
        seen = Seen(step, self.schedule[step - 1], record, hidden, logits)
        value, self.memory = _said(self.signal, seen, self.memory)
        if step < self.exit.minimum:
            return True
        stays = ~(value < self.exit.threshold)
        stays = stays if self.places is None else stays | self.places
        *_, last = self.unsettled
        now = last & stays if self.rows is None else last.index_copy(0, self.rows, last[self.rows] & stays)
        self.unsettled = (*self.unsettled[1:], now)
        if self.exit.mode == "mask":
            return self.inside
        if self.gathers:
            self._gather()
        return self.someone.among(self.inside)

    def _gather(self) -> None:
        """Find the sequences in which somebody is inside; the signal forgets the others. On a GPU this waits."""
        some = self.inside.any(1)
        before = torch.arange(len(some), device=some.device) if self.rows is None else self.rows
        kept = some[before].nonzero().flatten()
        if len(kept) < len(before):
            self.rows = before[kept]
            self.memory = pytree.tree_map(lambda t: t[kept] if isinstance(t, Tensor) else t, self.memory)


def _said(signal: Signal, seen: Seen, memory: Any) -> tuple[Tensor, Any]:
    """What a signal, which may be a user's own, says after a step: a number per token, and its memory."""
    said, wanted = signal(seen, memory), seen.record.Y.shape[:2]
    pair = isinstance(said, tuple) and len(said) == 2
    if not pair or not isinstance(said[0], Tensor) or said[0].shape != wanted:
        given = said[0] if pair else said
        found = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise ValueError(
            f"the signal {signal.name} gave {found}; forward must return one number per token, {tuple(wanted)}, and "
            "its memory, which may be None"
        )
    return said


@final
class _Someone:
    """Whether any token is still inside, asked without making a step wait for the device."""

    def __init__(self, device: torch.device):
        self.lags = device.type == "cuda"
        self.answer: Tensor | None = None
        self.arrived: Any = None

    def among(self, inside: Bool[Tensor, "B T"]) -> Live:
        """The mask, or True if it covers every token, or False if it covers none.

        A CPU knows at once. A GPU answers when it gets there; until then steps run for everyone, which changes nothing
        for tokens that have left.
        """
        if not self.lags:
            count = int(inside.sum())
            return inside if 0 < count < inside.numel() else count > 0
        if self.answer is not None and self.arrived.query() and not self.answer.item():
            return False
        if self.answer is None or self.arrived.query():
            self.answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            self.answer.copy_(inside.any(), non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()
        return inside
