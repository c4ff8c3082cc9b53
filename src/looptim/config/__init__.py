"""What can be configured; each part of a recipe has its file."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from .data import DataConfig
from .model import ATTENTION_LETTERS, LoopConfig, ModelConfig, Segment, parse_layout
from .pretrained import PretrainedConfig, shape, shape_of
from .strict import Strict
from .training import LoopSampling, OptimConfig, ParallelConfig, TrainConfig

__all__ = [
    "ATTENTION_LETTERS",
    "Config",
    "DataConfig",
    "LoopConfig",
    "LoopSampling",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PretrainedConfig",
    "Segment",
    "Strict",
    "TrainConfig",
    "parse_layout",
    "shape",
    "shape_of",
]


class Config(Strict):
    """A whole recipe."""

    recipe_keys: ClassVar[tuple[str, ...]] = ("loop", "base")

    model: ModelConfig
    pretrained: PretrainedConfig = PretrainedConfig()
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
        for key, wanted in (("balance", "pooled"), ("router", "shared")):
            # Sequences end together, so that the first visit of one is a later visit of another.
            if self.train.loops.scheme == "parcae" and getattr(self.model, key) == "per_visit":
                raise ValueError(f"train.loops.scheme = 'parcae' needs model.{key} = {wanted!r}, not 'per_visit'")
        if self.model.experts % self.parallel.expert:
            raise ValueError(
                f"model.experts ({self.model.experts}) must be a multiple of parallel.expert ({self.parallel.expert})"
            )
        loops = self.train.loops
        if loops.readouts and loops.scheme == "parcae":
            raise ValueError("train.loops.readouts cannot be combined with train.loops.scheme = 'parcae'; drop one")
        if loops.readout_prior and (min(loops.readout_prior) < 0 or not any(loops.readout_prior)):
            raise ValueError(f"train.loops.readout_prior must be weights, some positive, got {loops.readout_prior}")
        looped = [segment.loops for segment in self.model.segments if segment.loops is not None]
        if loops.readouts and len(looped) > 1:
            raise ValueError(f"train.loops.readouts needs one loop, and model.layout ({self.model.layout}) has more")
        fixed = loops.readouts and looped and loops.scheme == "fixed"
        if fixed and not loops.readouts < looped[0]:
            raise ValueError(
                f"train.loops.readouts ({loops.readouts}) must be less than the {looped[0]} loops of model.layout "
                f"({self.model.layout}), the last of which is read out anyway"
            )
        if fixed and len(loops.readout_prior) >= looped[0]:
            raise ValueError(
                f"train.loops.readout_prior has {len(loops.readout_prior)} weights, but model.layout "
                f"({self.model.layout}) has {looped[0] - 1} loops before the last"
            )
        sampled = loops.scheme != "fixed" or loops.grad_loops is not None or loops.readouts > 0 or loops.warmup > 0
        if sampled and all(segment.loops is None for segment in self.model.segments):
            raise ValueError(f"train.loops needs a loop, and model.layout ({self.model.layout}) has none")
        return self

    def to_toml(self) -> str:
        """The recipe as a file that loads to the same config."""
        import tomli_w

        values = self.model_dump(exclude_none=True)
        values["loop"] = values["model"].pop("loop")
        return tomli_w.dumps(values)
