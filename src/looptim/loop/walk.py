"""One call of a loop under a policy: what is remembered from step to step, and forgotten with the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from .signals import Seen, Signal

if TYPE_CHECKING:
    from jaxtyping import Bool

    from .depth import Depth, Exit
    from .loop import Loop
    from .transition import Record

Live = Tensor | bool
"""Who takes a step: a mask of sequences (B,) or of tokens (B, T), True for all, False for none."""
Decode = Callable[[Tensor], Tensor]
"""From what a loop returns to logits."""


class Walk:
    """One call of a loop under a policy: all that is remembered from step to step."""

    def __init__(self, policy: Depth, loop: Loop, e: Tensor, decode: Decode | None):
        self.policy, self.loop, self.decode, self.device = policy, loop, decode, e.device
        self.total = policy.count_steps(loop, len(e))
        self.schedule = loop.unroll(self.total)
        self.live: Live = True
        """Who takes the step that is running."""
        self.begun = False

    @property
    def needs_record(self) -> bool:
        return self.policy.needs_record

    def enter(self, step: int, record: Record | None) -> Live:
        """Who takes `step`, after what the step before computed; False ends the loop."""
        live = self.policy.live(step, self.total, self.live if self.begun else None, record)
        self.live, self.begun = live.to(self.device) if isinstance(live, Tensor) else live, True
        return self.live


@final
class ExitWalk(Walk):
    """A call under an `Exit`: it keeps who is inside, and what the signal remembers."""

    def __init__(self, policy: Exit, loop: Loop, e: Tensor, decode: Decode | None):
        super().__init__(policy, loop, e, decode)
        assert isinstance(policy.signal, Signal)
        if policy.signal.asks == "logits" and decode is None:
            raise ValueError(
                f"the signal {policy.signal.name} looks at predictions, which a loop without a model's head does not "
                "have; choose residual, change or acceleration, or run it in a LoopedLM"
            )
        self.exit, self.signal, self.memory = policy, policy.signal, None
        self.inside: Tensor | None = None
        self.places = torch.arange(e.shape[1], device=e.device) < policy.prompt if policy.prompt else None
        self.someone = _Someone(e.device)

    def enter(self, step: int, record: Record | None) -> Live:
        if record is not None and self.exit.threshold > 0:
            self.live = self._who_stays(step, record)
        return self.live

    def _who_stays(self, step: int, record: Record) -> Live:
        asks, loop = self.signal.asks, self.loop
        hidden = None if asks == "record" else loop.readout(record.Y)
        logits = self.decode(hidden) if asks == "logits" and self.decode and hidden is not None else None
        seen = Seen(step, self.schedule[step - 1], record, hidden, logits)
        value, self.memory = self.signal(seen, self.memory)
        if step < self.exit.minimum:
            return True
        stays = ~(value < self.exit.threshold)
        stays = stays if self.places is None else stays | self.places
        inside = stays if self.inside is None else self.inside & stays
        self.inside = inside
        return inside if self.exit.mode == "mask" else self.someone.among(inside)


@final
class _Someone:
    """Whether anybody is still inside, asked in a way for which no step waits."""

    def __init__(self, device: torch.device):
        self.lags = device.type == "cuda"
        self.answer: Tensor | None = None
        self.arrived: Any = None

    def among(self, inside: Bool[Tensor, "B T"]) -> Live:
        """The mask, or True where it is of all, or False where it is of none.

        A CPU knows at once. A GPU is asked, and answers when it has come so far: until then all steps are run, which
        changes nothing for those who have left.
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
