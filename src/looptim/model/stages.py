"""One forward of a looped model in stages: up to some step of its loop, on from there, and the coda."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..loop import Loop
from ..loop.depth import Fixed
from ..loop.loop import LoopState
from .attention import Attend
from .layout import Layout
from .lm import LoopedBody
from .visits import make_visits

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Begun(NamedTuple):
    """Some tokens, part of the way through a loop."""

    e: Float[Tensor, "B T d"]
    """What the loop was given."""
    state: LoopState


@final
class Stages:
    """The stages of a model with one loop, for tokens at some positions that attend through these slots.

    >>> from looptim import LoopedLM, ModelConfig
    >>> config = ModelConfig.tiny(layout="1-1x3-1", loop={"preset": "huginn"})
    >>> model = LoopedLM(config, seed=0).eval()
    >>> tokens, positions = torch.tensor([[1, 2, 3]]), torch.arange(3)
    >>> stages = Stages(model, Layout.of(model.config), model.embed(tokens), positions)
    >>> begun = stages.begin(model.embed(tokens), 2)
    >>> torch.equal(model.head(stages.finish(stages.go_on(begun))), model(tokens))
    True
    """

    def __init__(
        self,
        body: LoopedBody,
        layout: Layout,
        h: Float[Tensor, "B T d"],
        positions: Int[Tensor, "*B T"],
        attend: Sequence[Attend] | None = None,
    ):
        at = find_loop(layout)
        self.body = body
        self.loop = cast(Loop, body.loops[0])
        rows, _ = make_visits(layout, h, positions, attend, None)
        self.before, self.steps, self.after = rows[:at], rows[at], rows[at + 1 :]

    def begin(self, h: Float[Tensor, "B T d"], steps: int) -> Begun:
        """From embeddings through the prelude and the first steps of the loop."""
        e = self.body.run(h, [visit for segment in self.before for row in segment for visit in row])
        return Begun(e, self._loop(e, None, steps))

    def go_on(self, begun: Begun) -> Begun:
        """The steps of the loop that are left."""
        return begun._replace(state=self._loop(begun.e, begun.state, len(self.steps)))

    def finish(self, begun: Begun) -> Float[Tensor, "B T d"]:
        """The coda's normed output."""
        h = self.loop.readout(begun.state.Y)
        return self.body.norm(self.body.run(h, [visit for segment in self.after for row in segment for visit in row]))

    def _loop(self, e: Tensor, start: LoopState | None, steps: int) -> LoopState:
        blocks = [partial(self.body.run, visits=row) for row in self.steps]
        return self.loop(e, blocks, depth=Fixed(steps), start=start, return_state=True)[1]


def find_loop(layout: Layout) -> int:
    """Which segment is the loop of a model that has exactly one."""
    looped = [index for index, segment in enumerate(layout.segments) if segment.looped]
    if len(looped) != 1:
        raise ValueError(f"the layout has {len(looped)} looped segments; only a model with one has these stages")
    return looped[0]


def join(begun: Sequence[Begun]) -> Begun:
    """Tokens that follow each other, which have come equally far, as one call."""
    first = begun[0].state
    if len(begun) == 1:
        return begun[0]

    def cat(*parts: Tensor | float) -> Tensor | float:
        tensors = [part for part in parts if isinstance(part, Tensor)]
        return torch.cat(tensors, dim=1) if tensors and tensors[0].dim() > 1 else parts[0]

    carry = pytree.tree_map(cat, first.carry, *(each.state.carry for each in begun[1:]))
    Y, depth = (torch.cat([getattr(each.state, name) for each in begun], dim=1) for name in ("Y", "depth"))
    return Begun(torch.cat([each.e for each in begun], dim=1), LoopState(Y, carry, depth, first.live))
