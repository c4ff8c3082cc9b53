"""Visits of blocks in a running forward, and what stands for a token at the visits it skips."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from ..loop.walk import Live, Walk
from .attention import Attend

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxtyping import Bool, Float


class Visit(NamedTuple):
    """One unrolled layer of a running forward: which block, through which slot, at which positions."""

    block: int
    attend: Attend
    rope: tuple[Tensor, Tensor]
    number: Tensor
    """How often the block was visited before."""


@final
class HeldSlot:
    """A slot at which tokens that have left the loop stand with the keys and values they had.

    k_{l,i} = k_{tau_i,i} and v_{l,i} = v_{tau_i,i} for the visits l > tau_i that token i skips.
    """

    def __init__(self, attend: Attend, live: Live, before: tuple[Tensor, Tensor] | None):
        self.attend, self.live, self.before = attend, live, before
        self.kept: tuple[Tensor, Tensor] | None = None

    def __call__(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B K T D"],
        v: Float[Tensor, "B K T D"],
    ) -> Float[Tensor, "B H T D"]:
        if isinstance(self.live, Tensor) and self.before is not None:
            inside = self.live[:, None, :, None]
            k, v = torch.where(inside, k, self.before[0]), torch.where(inside, v, self.before[1])
        # Recomputation comes here again, long after the next visit has taken what was kept.
        self.kept = (k, v)
        return self.attend(q, k, v)


@final
class HeldKeys:
    """The keys and values of the last visit of each block, in one call of a loop that tokens leave."""

    def __init__(self, walk: Walk):
        self.walk = walk
        self.last: dict[int, HeldSlot] = {}

    @property
    def live(self) -> Bool[Tensor, "B T"] | None:
        """Who takes the step that is running; None for all."""
        return self.walk.live if isinstance(self.walk.live, Tensor) else None

    def slot(self, visit: Visit) -> HeldSlot:
        """The slot of this visit."""
        before = self.last.get(visit.block)
        slot = HeldSlot(visit.attend, self.walk.live, None if before is None else before.kept)
        self.last[visit.block] = slot
        return slot

    def skip(self, visits: Iterable[Visit]) -> None:
        """Give slots of a cache that no token comes to what they keep."""
        for visit in visits:
            kept = self.last[visit.block].kept
            assert kept is not None
            k, v = kept
            visit.attend(k[:, :, :0], k, v)
