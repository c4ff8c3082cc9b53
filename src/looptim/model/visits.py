"""Visits of blocks during a forward pass, and what replaces a token at the visits it skips."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from ..loop.walk import Walk
from .attention import Attend, causal_attention, document_starts
from .layout import Layout
from .moe import MoEStats
from .rope import rope_table, rotation_matrix

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Visit(NamedTuple):
    """One unrolled layer of a forward pass: its block, its slot, and its positions."""

    block: int
    attend: Attend
    rope: tuple[Tensor, Tensor]
    number: Tensor
    """How often the block was visited before."""
    turn: Tensor | None = None
    """The rotations as a matrix, for a token that is alone."""


@final
class HeldSlot:
    """A slot in which tokens that have left the loop keep the keys and values of their last visit.

    k_{l,i} = k_{tau_i,i} and v_{l,i} = v_{tau_i,i} for the visits l > tau_i that token i skips.
    """

    def __init__(self, attend: Attend, walk: Walk, before: tuple[Tensor, Tensor] | None):
        self.attend, self.live, self.rows, self.before = attend, walk.live, walk.rows, before
        self.kept: tuple[Tensor, Tensor] | None = None

    def __call__(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B K T D"],
        v: Float[Tensor, "B K T D"],
    ) -> Float[Tensor, "B H T D"]:
        if self.rows is not None:
            assert self.before is not None
            k, v = (old.index_copy(0, self.rows, new) for old, new in zip(self.before, (k, v), strict=True))
        if isinstance(self.live, Tensor) and self.before is not None:
            inside = self.live[:, None, :, None]
            k, v = torch.where(inside, k, self.before[0]), torch.where(inside, v, self.before[1])
        # Recomputation returns here long after the next visit has replaced what was kept.
        self.kept = (k, v)
        return self.attend(q, k, v) if self.rows is None else self.attend(q, k, v, rows=self.rows)


@final
class HeldKeys:
    """The keys and values of the last visit of each block, in one call of a loop that tokens may leave."""

    def __init__(self, walk: Walk):
        self.walk = walk
        self.last: dict[int, HeldSlot] = {}

    def enter(self, visit: Visit) -> tuple[HeldSlot, tuple[Tensor, Tensor], Tensor | None]:
        """The slot, the rotations and the live tokens (None for all) of a visit, of the sequences that come to it."""
        live, rows, (cos, sin) = self.walk.live, self.walk.rows, visit.rope
        live = live if isinstance(live, Tensor) else None
        if rows is not None:
            live = None if live is None else live[rows]
            cos, sin = (t[rows] if t.dim() == 3 and len(t) > 1 else t for t in (cos, sin))
        return self.slot(visit), (cos, sin), live

    def whole(self, h: Tensor) -> Tensor:
        """What a block gave, in its place in the batch; zero for sequences that did not run the step."""
        rows = self.walk.rows
        return h if rows is None else h.new_zeros(self.walk.batch, *h.shape[1:]).index_copy(0, rows, h)

    def slot(self, visit: Visit) -> HeldSlot:
        """The slot of this visit."""
        before = self.last.get(visit.block)
        slot = HeldSlot(visit.attend, self.walk, None if before is None else before.kept)
        self.last[visit.block] = slot
        return slot

    def skip(self, visits: Iterable[Visit]) -> None:
        """Store the kept keys and values in the slots of a cache that no token visits."""
        for visit in visits:
            kept = self.last[visit.block].kept
            assert kept is not None
            k, v = kept
            visit.attend(k[:, :, :0], k, v)


@final
class Reading:
    """Predictions after every step through the coda, which is visited with keys and values of its own each time.

    A token that has left stands there with those of its last such visit too.
    """

    held: HeldKeys

    def __init__(
        self, run: Callable[..., Tensor], head: Callable[[Tensor], Tensor], visits: Sequence[Visit], times: int
    ):
        size = len(visits) // max(times, 1)
        self.run, self.head = run, head
        self.waiting = [visits[first : first + size] for first in range(0, len(visits), size)]

    def __call__(self, h: Float[Tensor, "B T d"]) -> Float[Tensor, "B T vocab"]:
        return self.head(self.run(h, self.waiting.pop(0), held=self.held))

    def skip(self) -> None:
        """Give slots of a cache that the coda does not come to what they keep."""
        if self.held.last:
            self.held.skip(visit for visits in self.waiting for visit in visits)


def make_visits(
    layout: Layout,
    h: Float[Tensor, "B T d"],
    positions: Int[Tensor, "*B T"] | None,
    attend: Sequence[Attend] | None,
    documents: Int[Tensor, "B T"] | None,
    *,
    through_coda: bool = False,
    alone: Container[int] = (),
    head_dim: int = 0,
) -> tuple[list[list[list[Visit]]], list[Visit]]:
    """Every unrolled layer, with all its block is called with: by segment and step, and then those of `readings`.

    Blocks that are `alone` with a single token are given its rotations as matrices, for heads of the width `head_dim`.
    """
    starts = None if documents is None else document_starts(documents)
    if positions is None:
        positions = torch.arange(h.shape[1], device=h.device)
        positions = positions if starts is None else positions - starts
    dtype = torch.promote_types(h.dtype, torch.float32)
    layers = [*layout.layers, *layout.readings(through_coda)]
    kinds = dict.fromkeys(layer.attention for layer in layers)
    rope = {kind: rope_table(positions, kind.rotary_width, kind.theta, dtype=dtype) for kind in kinds}
    turned = dict.fromkeys(layer.attention for layer in layers if layer.block in alone)
    turns = {kind: rotation_matrix(*rope[kind], head_dim) for kind in turned}
    if attend is None:
        slots = {kind: partial(causal_attention, window=kind.window, starts=starts) for kind in kinds}
        attend = [slots[layer.attention] for layer in layers]
    assert len(attend) == len(layers)
    # The number of a visit is a tensor, so that a compiled block takes it as data and is compiled once for all.
    numbers = torch.arange(1 + max(layer.visit for layer in layers), device=h.device).unbind()
    visits = iter(
        [
            Visit(layer.block, slot, rope[kind], numbers[layer.visit], turns[kind] if layer.block in alone else None)
            for layer, slot in zip(layers, attend, strict=True)
            for kind in (layer.attention,)
        ]
    )
    by_step = [[[next(visits) for _ in step] for step in segment.steps] for segment in layout.segments]
    return by_step, list(visits)


def of_the_live(stats: list[tuple[int, MoEStats]], live: Tensor | bool) -> list[tuple[int, MoEStats]]:
    """What MoE layers report about the sequences that took the step; they leave out single tokens themselves."""
    if not isinstance(live, Tensor):
        return stats
    live = live if live.dim() == 1 else live.any(1)
    # Where sequences that have left leave the batch too, there is nothing of them.
    return [
        (block, seen if len(seen.load) < len(live) else MoEStats(seen.load[live], seen.aux_loss[live]))
        for block, seen in stats
    ]
