"""The layers of a model, parsed once from its config and read by the model, its count and its adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, final

from ..config import ModelConfig


class AttentionKind(NamedTuple):
    """The meaning of a letter of `pattern` for one config."""

    name: str
    """The word that transformers has for it, if any. Kinds without one are cached in full and masked by `window`."""
    window: int | None
    """The number of keys a query sees, including its own; None for all."""
    rotary_width: int
    theta: float


ATTENTION: dict[str, Callable[[ModelConfig], AttentionKind]] = {
    "S": lambda c: AttentionKind("sliding_attention", c.window, c.sliding_rotary, c.sliding_theta),
    "F": lambda c: AttentionKind("full_attention", None, c.full_rotary, c.full_theta),
}
"""The attention kinds by letter. A new kind is an entry here, plus its letter and keys in config/model.py."""


class LayerSpec(NamedTuple):
    """One unrolled layer: one attention call, and one entry in the KV cache."""

    block: int
    """The index of the distinct block whose weights it uses."""
    visit: int
    """How often the block has been visited before."""
    attention: AttentionKind
    feedforward: Literal["dense", "experts"]


class SegmentSpec(NamedTuple):
    """A run of blocks: a single pass, or one row of layers per step of a loop."""

    looped: bool
    steps: tuple[tuple[LayerSpec, ...], ...]


@final
@dataclasses.dataclass(frozen=True)
class Layout:
    """The layers of a model, by segment and step, in the order they run.

    >>> layout = Layout.of(ModelConfig.tiny(layout="1-2x3-1", pattern="SF"))
    >>> [layer.block for layer in layout.layers], [layer.attention.name for layer in layout.blocks[:2]]
    ([0, 1, 2, 1, 2, 1, 2, 3], ['sliding_attention', 'full_attention'])
    >>> layout.visits
    [1, 3, 3, 1]
    """

    segments: tuple[SegmentSpec, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> Layout:
        """The layout of a config."""
        kinds = [ATTENTION[letter](config) for letter in config.pattern]
        segments, first = [], 0
        for K, loops in config.segments:
            layers = [
                LayerSpec(block, 0, kinds[block % len(kinds)], "dense" if block < config.dense_layers else "experts")
                for block in range(first, first + K)
            ]
            steps = tuple(tuple(layer._replace(visit=visit) for layer in layers) for visit in range(loops or 1))
            segments.append(SegmentSpec(loops is not None, steps))
            first += K
        return cls(tuple(segments))

    @property
    def layers(self) -> list[LayerSpec]:
        """Every unrolled layer."""
        return [layer for segment in self.segments for step in segment.steps for layer in step]

    @property
    def coda(self) -> tuple[LayerSpec, ...]:
        """The layers after the loop, for a layout that has one loop and something after it."""
        rests = [self.segments[place + 1 :] for place, segment in enumerate(self.segments) if segment.looped]
        return rests[0][0].steps[0] if len(rests) == 1 and rests[0] else ()

    def readings(self, through_coda: bool) -> list[LayerSpec]:
        """The visits of the coda after every step but the last, behind `layers` in a KV cache; none unless wanted."""
        if not through_coda:
            return []
        if not self.coda:
            raise ValueError(
                "a signal with _coda reads predictions through the layers after the loop, and this layout has "
                f"{'none' if self.loops == 1 else f'{self.loops} loops'}; leave _coda out, or choose residual"
            )
        steps = next(len(segment.steps) for segment in self.segments if segment.looped)
        return [layer for _ in range(steps - 1) for layer in self.coda]

    @property
    def loops(self) -> int:
        """How many looped segments there are."""
        return sum(segment.looped for segment in self.segments)

    @property
    def blocks(self) -> list[LayerSpec]:
        """The first visit of every distinct block."""
        return [layer for layer in self.layers if layer.visit == 0]

    @property
    def visits(self) -> list[int]:
        """How often each distinct block runs in one forward."""
        return [len(segment.steps) for segment in self.segments for _ in segment.steps[0]]
