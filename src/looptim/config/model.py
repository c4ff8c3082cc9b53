"""A model's config: its layout, its parts, and the transition in its loop."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from .strict import Strict

DEEPEST = 10_000
"""The largest number of unrolled blocks that a model may have."""
LARGEST = 2**40
"""The largest number of elements that a matrix may have, which is four terabytes."""


class Segment(NamedTuple):
    """`K` blocks in a row, run once or looped `loops` times with shared weights."""

    blocks: int
    loops: int | None
    """The number of loops; None for plain blocks."""


ATTENTION_LETTERS = {"S": "sliding", "F": "full"}
"""The letters of `pattern`; what they stand for is in model/layout.py."""


def parse_layout(layout: str) -> tuple[Segment, ...]:
    """The paper's notation, `4-4x3-2`: segments joined by `-`, K plain blocks or KxR blocks looped R times.

    >>> parse_layout("4-4x3-2")
    (Segment(blocks=4, loops=None), Segment(blocks=4, loops=3), Segment(blocks=2, loops=None))
    """
    segments = []
    for text in layout.split("-"):
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
        if match is None:
            raise ValueError(
                f"layout {layout!r} does not parse at {text!r}; join segments K or KxR with '-', as in '4-4x3-2'"
            )
        blocks, loops = int(match[1]), int(match[2]) if match[2] else None
        if loops is not None and (blocks == 0 or loops == 0):
            raise ValueError(
                f"layout {layout!r} loops nothing at {text!r}; K and R of a looped segment must be at least 1"
            )
        segments.append(Segment(blocks, loops))
    layers = sum(segment.blocks * (segment.loops or 1) for segment in segments)
    if not 0 < layers <= DEEPEST:
        raise ValueError(f"layout {layout!r} has {layers} unrolled blocks; give at least 1 and at most {DEEPEST:,}")
    return tuple(segments)


class LoopConfig(Strict):
    """A transition by the name of a preset, with its options."""

    preset: str = Field(
        "none", description="A name from `looptim zoo`, or your own file.py:function; none if nothing loops."
    )
    options: dict[str, Any] = Field({}, description="The transition's options; its docstring lists them.")
    noncausal: bool = Field(False, description="Train even though tokens can see later tokens or other sequences.")
    fused: bool = Field(
        True, description="Use the fused kernels where there are any; false uses the readable definition."
    )


class ModelConfig(Strict):
    """A looped language model; the defaults are the paper's architecture (Table 8)."""

    layout: str = Field(description="Segments of blocks in the paper's notation, such as 4-4x3-2.")
    width: int = Field(1024, ge=1, description="Width d of the hidden state.")
    vocab_size: int = Field(
        128_896, ge=1, description="Size of the vocabulary; a bpe tokenizer is trained to this size."
    )
    max_length: int = Field(4096, ge=1, description="The longest sequence the model accepts.")
    tied: bool = Field(False, description="Whether the head shares the embedding's weights.")
    pairs: bool = Field(False, description="Whether each position reads two tokens, as the sum of their embeddings.")

    pattern: str = Field(
        "SSSF", description="Attention of each distinct block, S(liding) or F(ull); the pattern repeats."
    )
    heads: int = Field(16, ge=1, description="Number of query heads.")
    kv_heads: int = Field(4, ge=1, description="Number of key and value heads; must divide `heads`.")
    head_dim: int = Field(128, ge=2, description="Width of each head.")
    qk_norm: bool = Field(True, description="Whether queries and keys are normalized within each head.")
    window: int = Field(512, ge=1, description="Keys that a query of a sliding layer sees, including its own.")
    sliding_rotary: int = Field(128, ge=2, description="Rotated dimensions of each head in sliding layers.")
    sliding_theta: float = Field(1_000.0, gt=0, description="Base of the rotary frequencies in sliding layers.")
    full_rotary: int = Field(64, ge=2, description="Rotated dimensions of each head in full layers.")
    full_theta: float = Field(10_000.0, gt=0, description="Base of the rotary frequencies in full layers.")

    dense_layers: int = Field(2, ge=0, description="Number of leading distinct blocks with a dense feed-forward layer.")
    dense_hidden: int = Field(4096, ge=1, description="Hidden width of a dense feed-forward layer.")
    experts: int = Field(256, ge=1, description="Number of routed experts in each layer.")
    top_k: int = Field(8, ge=1, description="Number of routed experts per token.")
    expert_hidden: int = Field(384, ge=1, description="Hidden width of a routed expert.")
    shared_hidden: int = Field(384, ge=1, description="Hidden width of the shared expert, which sees every token.")
    routed_scaling: float = Field(2.5, description="Factor on the output of the routed experts.")
    router: Literal["shared", "per_visit"] = Field(
        "shared", description="Whether all visits of a looped layer share a router or each has its own."
    )
    balance: Literal["pooled", "per_visit"] = Field(
        "pooled", description="Whether router biases are kept per layer or per visit of it."
    )
    balance_rate: float = Field(5e-3, ge=0, description="Step of the router bias in each update.")
    aux_coefficient: float = Field(1e-3, ge=0, description="Weight of the sequence-level auxiliary loss.")

    init_std: float = Field(0.006, gt=0, description="Standard deviation of the initial weights.")
    embedding_std: float | None = Field(None, gt=0, description="The same for the embedding. Default: `init_std`.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon under the square root of every norm.")
    loop: LoopConfig = LoopConfig()

    @classmethod
    def tiny(cls, **changes: Any) -> ModelConfig:
        """The smallest model with every part: both kinds of attention, dense and routed blocks, and a loop.

        >>> ModelConfig.tiny(window=4).window
        4
        """
        values: dict[str, Any] = {"layout": "1-1x2-1", "width": 32, "vocab_size": 257, "max_length": 32, "tied": True}
        values |= {"pattern": "SF", "heads": 2, "kv_heads": 1, "head_dim": 16, "window": 8}
        values |= {"sliding_rotary": 16, "full_rotary": 8, "init_std": 0.05, "loop": {"preset": "operloop"}}
        values |= {"dense_layers": 1, "dense_hidden": 64, "experts": 4, "top_k": 2}
        values |= {"expert_hidden": 16, "shared_hidden": 16}
        return cls(**values | changes)

    @field_validator("layout", mode="before")
    @classmethod
    def _layout_is_text(cls, layout: Any) -> Any:
        # The command line reads `--set model.layout=18` as a number.
        return str(layout) if isinstance(layout, int) and not isinstance(layout, bool) else layout

    @field_validator("layout")
    @classmethod
    def _layout_parses(cls, layout: str) -> str:
        parse_layout(layout)
        return layout

    @field_validator("pattern")
    @classmethod
    def _pattern_is_known(cls, pattern: str) -> str:
        if not pattern or set(pattern) - ATTENTION_LETTERS.keys():
            known = " and ".join(f"{letter} ({word})" for letter, word in ATTENTION_LETTERS.items())
            raise ValueError(f"pattern {pattern!r} must be letters {known}, as in 'SSSF'")
        return pattern

    @model_validator(mode="after")
    def _numbers_fit_together(self) -> ModelConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.top_k > self.experts:
            raise ValueError(f"top_k ({self.top_k}) must not exceed the number of experts ({self.experts})")
        for name in ("sliding_rotary", "full_rotary"):
            rotary = getattr(self, name)
            if rotary % 2 or rotary > self.head_dim:
                raise ValueError(f"{name} ({rotary}) must be even and at most head_dim ({self.head_dim})")
        rows = {"vocab_size": self.vocab_size, "heads * head_dim": self.heads * self.head_dim}
        rows |= {"dense_hidden": self.dense_hidden, "shared_hidden": self.shared_hidden}
        rows |= {"experts * expert_hidden": self.experts * self.expert_hidden}
        largest = max(rows, key=lambda name: rows[name])
        if rows[largest] * self.width > LARGEST:
            raise ValueError(
                f"width ({self.width}) times {largest} ({rows[largest]}) makes a matrix of more than "
                f"{LARGEST:,} elements; lower one of them"
            )
        looped = any(segment.loops is not None for segment in self.segments)
        if looped and self.loop.preset == "none":
            raise ValueError(
                f"layout {self.layout!r} has a looped segment, so loop.preset must name a transition, not 'none'"
            )
        if not looped and self.loop.preset != "none":
            raise ValueError(
                f"layout {self.layout!r} has no looped segment, so loop.preset must be 'none', not {self.loop.preset!r}"
            )
        return self

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layout, parsed."""
        return parse_layout(self.layout)

    def with_loops(self, loops: int, *, at_most: bool = False) -> ModelConfig:
        """The same model with every looped segment run `loops` times or, with `at_most`, at most that often."""
        if isinstance(loops, bool) or not isinstance(loops, int) or loops < 1:
            raise ValueError(f"loops must be a whole number of at least 1, got {loops!r}")
        texts = [
            str(s.blocks) if s.loops is None else f"{s.blocks}x{min(loops, s.loops) if at_most else loops}"
            for s in self.segments
        ]
        return self.model_copy(update={"layout": "-".join(texts)})
