"""What can be configured: typed, frozen, an unknown key an error that names the nearest known one."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .base.choices import nearest


class Strict(BaseModel):
    """A frozen config that forbids unknown keys and words its errors in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(_one_line(error, type(self))) from None


def _one_line(error: ValidationError, config: type[BaseModel]) -> str:
    """The first thing that is wrong: where, what was given, what to do."""
    errors = error.errors()
    # A misspelled key is why another one is missing.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        # A recipe may also have these two, of which a config knows nothing.
        known = [*config.model_fields, *(("loop", "base") if config is Config else ())]
        return f"unknown key {where!r}{nearest(where, known)} known: {', '.join(known)}"
    if first["type"] == "missing":
        return f"{where} is missing; give it a value"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{where}: {message}" if where and not message.startswith(where) else message
    return f"{where}: {message[0].lower()}{message[1:]}, got {first['input']!r}"


DEEPEST = 10_000
"""Unrolled blocks of a model at most."""
LARGEST = 2**40
"""Elements of a matrix at most: four terabytes of it."""


class Segment(NamedTuple):
    """`K` blocks in a row, run once or looped `loops` times with shared weights."""

    blocks: int
    loops: int | None
    """None for plain blocks."""


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

    preset: str = Field("none", description="Of `looptim zoo`, or file.py:function of your own; none without a loop.")
    options: dict[str, Any] = Field({}, description="Of the transition, as its docstring lists them.")
    noncausal: bool = Field(False, description="Train it although a token sees later ones or other sequences.")
    fused: bool = Field(True, description="Run transitions of known parts fused; false is the readable definition.")


class ModelConfig(Strict):
    """A looped language model; the defaults are the paper's architecture (Table 8)."""

    layout: str = Field(description="Segments of blocks in the paper's notation, such as 4-4x3-2.")
    width: int = Field(1024, ge=1, description="Of the hidden state, d.")
    vocab_size: int = Field(128_896, ge=1, description="Tokens the model knows; bpe is trained to so many.")
    max_length: int = Field(4096, ge=1, description="The longest sequence the model accepts.")
    tied: bool = Field(False, description="Whether the head uses the embedding's weights.")
    pairs: bool = Field(False, description="Whether a position reads two tokens, the sum of their embeddings.")

    pattern: str = Field("SSSF", description="S(liding) or F(ull) attention, repeated over the distinct blocks.")
    heads: int = Field(16, ge=1, description="Heads of queries.")
    kv_heads: int = Field(4, ge=1, description="Heads of keys and values, each for equally many of queries.")
    head_dim: int = Field(128, ge=2, description="Width of a head.")
    qk_norm: bool = Field(True, description="Whether queries and keys are normed, head by head.")
    window: int = Field(512, ge=1, description="Keys a query of a sliding layer sees, itself included.")
    sliding_rotary: int = Field(128, ge=2, description="Rotated dimensions of each head, sliding layers.")
    sliding_theta: float = Field(1_000.0, gt=0, description="Base of the rotations, sliding layers.")
    full_rotary: int = Field(64, ge=2, description="Rotated dimensions of each head, full layers.")
    full_theta: float = Field(10_000.0, gt=0, description="Base of the rotations, full layers.")

    dense_layers: int = Field(2, ge=0, description="Leading distinct blocks with a dense feed-forward layer.")
    dense_hidden: int = Field(4096, ge=1, description="Hidden width of a dense feed-forward layer.")
    experts: int = Field(256, ge=1, description="Routed experts of a layer.")
    top_k: int = Field(8, ge=1, description="Experts a token goes to.")
    expert_hidden: int = Field(384, ge=1, description="Hidden width of a routed expert.")
    shared_hidden: int = Field(384, ge=1, description="Hidden width of the expert that every token goes to.")
    routed_scaling: float = Field(2.5, description="Factor of what the routed experts say.")
    balance: Literal["pooled", "per_visit"] = Field("pooled", description="A router bias per layer, or per visit.")
    balance_rate: float = Field(5e-3, ge=0, description="How far the router bias moves in an update.")
    aux_coefficient: float = Field(1e-3, ge=0, description="Of the sequence-level auxiliary loss.")

    init_std: float = Field(0.006, gt=0, description="Standard deviation of the initial weights.")
    embedding_std: float | None = Field(None, gt=0, description="Of the initial embeddings, where not `init_std`.")
    norm_eps: float = Field(1e-5, gt=0, description="Added under the root of every norm.")
    loop: LoopConfig = LoopConfig()

    @classmethod
    def tiny(cls, **changes: Any) -> ModelConfig:
        """The smallest model that has every part: both kinds of attention, dense and routed blocks, a loop.

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
        # `--set model.layout=18` comes as a number.
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
                f"width ({self.width}) times {largest} ({rows[largest]}) is the size of a matrix, and more than "
                f"{LARGEST:,} fit no machine"
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
        """The same model with every looped segment run `loops` times, or no more often than that."""
        if isinstance(loops, bool) or not isinstance(loops, int) or loops < 1:
            raise ValueError(f"loops must be a whole number of at least 1, got {loops!r}")
        texts = [
            str(s.blocks) if s.loops is None else f"{s.blocks}x{min(loops, s.loops) if at_most else loops}"
            for s in self.segments
        ]
        return self.model_copy(update={"layout": "-".join(texts)})


class OptimConfig(Strict):
    """Muon and AdamW with one learning rate; the defaults are of the paper's 18 layers (Table 10), but for `warmup`."""

    lr: float = Field(7.3e-4, gt=0, description="Peak learning rate.")
    min_lr: float = Field(1e-5, ge=0, description="Learning rate of the last update, at the end of a cosine.")
    warmup: int = Field(100, ge=0, description="Updates of linear warm-up.")
    weight_decay: float = Field(0.1, ge=0, description="Of matrices; vectors and transitions have none.")
    clip: float = Field(1.0, gt=0, description="Largest global norm of the gradient.")
    rates: dict[str, float] = Field({}, description="Factors of the rate, by group, as in {transition = 0.5}.")


class LoopSampling(Strict):
    """How many loops an update runs: the layout's number, or a random one for transitions shared over loops."""

    scheme: Literal["fixed", "huginn", "parcae"] = Field("fixed", description="Who draws the number of loops.")
    mean: float = Field(8.0, gt=0, description="Mean number of loops of a random scheme, to which Huginn's adds one.")
    grad_loops: int | None = Field(None, ge=1, description="Backpropagate through the last so many loops only.")
    readouts: int = Field(0, ge=0, description="Also read out after so many earlier loops, drawn anew in every update.")
    readout_weight: float = Field(1.0, gt=0, description="Of the mean loss of these earlier read-outs.")
    readout_prior: tuple[float, ...] = Field(
        (), description="How often each loop is drawn, relative to each other; equally often by default."
    )


class TrainConfig(Strict):
    """How a model is trained."""

    steps: int = Field(1000, ge=1, description="Updates.")
    seed: int = Field(0, ge=0, description="Of the initial weights, the order of the data, and all else at random.")
    data_seed: int | None = Field(None, ge=0, description="Of the order of the data, where it is not `seed`.")
    seq_len: int = Field(4096, ge=1, description="Tokens of a sequence.")
    batch_size: int = Field(1024, ge=1, description="Sequences per update, over all processes.")
    micro_batch: int | None = Field(None, ge=1, description="Sequences per forward and process; all by default.")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast, weights in fp32.")
    compile: bool = Field(False, description="Compile the blocks.")
    activation_checkpointing: bool = Field(False, description="Recompute each block in the backward.")
    reversible: bool = Field(False, description="Rebuild the loop's states in the backward instead of keeping them.")
    loops: LoopSampling = LoopSampling()
    log_every: int = Field(10, ge=1, description="Updates between logged lines.")
    valid_every: int = Field(250, ge=1, description="Updates between validations.")
    valid_batches: int = Field(8, ge=1, description="Batches of a validation.")
    sample: str | None = Field(None, description="A text that is continued at every validation, for the report.")
    checkpoint_every: int = Field(250, ge=1, description="Updates between checkpoints.")
    async_checkpoints: bool = Field(False, description="Write them meanwhile, of copies in host memory.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept.")
    keep_every: int | None = Field(None, ge=1, description="Checkpoints at multiples of this step are kept for good.")
    track: tuple[Literal["trackio", "wandb", "tensorboard"], ...] = Field(
        (), description="Trackers that get the metrics too: the name of one, or a list."
    )

    @field_validator("track", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class DataConfig(Strict):
    """Where the tokens come from and how they are cut; `docs/data.md` has the forms of `source`."""

    source: str = Field("stdlib", description="stdlib, a path or glob, hf:NAME, synthetic:NAME, or mixture.")
    mixture: dict[str, float] = Field({}, description="Of the source mixture: other sources, with their weights.")
    field: str = Field("text", description="The field of jsonl, parquet and hf: rows that holds the text.")
    split: str = Field("train", description="The split of an hf: dataset.")
    name: str | None = Field(None, description="The configuration of an hf: dataset.")
    tokenizer: str = Field("bpe", description="bpe, bytes, a path of a tokenizer.json or hf:NAME.")
    valid_fraction: float = Field(0.02, ge=0, lt=1, description="The share of documents held out, by their hash.")
    valid_fold: int = Field(0, ge=0, description="Which share: another fold holds out other documents.")
    valid_source: str | None = Field(None, description="Held-out files; all of `source` is then trained on.")
    mask_boundaries: bool = Field(False, description="Whether targets across a document boundary become -100.")
    mask_attention: bool = Field(
        False, description="Whether attention stays inside a document and positions begin with it."
    )
    cache: str | None = Field(None, description="A folder; by default $LOOPTIM_CACHE or ~/.cache/looptim.")
    options: dict[str, Any] = Field({}, description="Knobs of a synthetic task, or arguments of an hf: dataset.")

    @model_validator(mode="after")
    def _fold_exists(self) -> DataConfig:
        if self.valid_fold and (self.valid_fold + 1) * self.valid_fraction > 1:
            raise ValueError(
                f"valid_fold ({self.valid_fold}) does not exist: shares of valid_fraction ({self.valid_fraction}) "
                f"number {int(1 / self.valid_fraction)}, from 0"
            )
        return self


class ParallelConfig(Strict):
    """How processes share a model, whatever their number: all have rows of the batch; the results do not change."""

    replicate: int = Field(1, ge=1, description="Copies of the model; nodes, to gather parameters inside a node only.")
    shard: int | None = Field(None, ge=1, description="Processes that share a copy; by default all there are for one.")
    expert: int = Field(1, ge=1, description="Of those, neighbors that share the experts; tokens travel to them.")


class Config(Strict):
    """A whole recipe."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _numbers_fit_together(self) -> Config:
        if self.train.seq_len > self.model.max_length:
            raise ValueError(
                f"train.seq_len ({self.train.seq_len}) must not exceed model.max_length ({self.model.max_length})"
            )
        if self.optim.warmup >= self.train.steps:
            raise ValueError(f"optim.warmup ({self.optim.warmup}) must be less than train.steps ({self.train.steps})")
        if self.optim.min_lr > self.optim.lr:
            raise ValueError(f"optim.min_lr ({self.optim.min_lr}) must not exceed optim.lr ({self.optim.lr})")
        if self.train.loops.scheme == "parcae" and self.model.balance == "per_visit":
            # Sequences end together, so that the first visit of one is a later visit of another.
            raise ValueError("train.loops.scheme = 'parcae' needs model.balance = 'pooled', not 'per_visit'")
        if self.model.experts % self.parallel.expert:
            raise ValueError(
                f"model.experts ({self.model.experts}) must be a multiple of parallel.expert ({self.parallel.expert})"
            )
        loops = self.train.loops
        if loops.readouts and loops.scheme == "parcae":
            raise ValueError("train.loops.readouts has no meaning where sequences wait for their first loop (parcae)")
        if loops.readout_prior and (min(loops.readout_prior) < 0 or not any(loops.readout_prior)):
            raise ValueError(f"train.loops.readout_prior must be weights, some positive, got {loops.readout_prior}")
        looped = [segment.loops for segment in self.model.segments if segment.loops is not None]
        if loops.readouts and len(looped) > 1:
            raise ValueError(f"train.loops.readouts needs one loop, and model.layout ({self.model.layout}) has more")
        sampled = loops.scheme != "fixed" or loops.grad_loops is not None or loops.readouts > 0
        if sampled and all(segment.loops is None for segment in self.model.segments):
            raise ValueError(f"train.loops needs a loop, and model.layout ({self.model.layout}) has none")
        return self

    def to_toml(self) -> str:
        """The recipe as a file that loads to the same config."""
        import tomli_w

        values = self.model_dump(exclude_none=True)
        values["loop"] = values["model"].pop("loop")
        return tomli_w.dumps(values)
