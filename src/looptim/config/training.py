"""How a model is trained: the optimizer, the updates, and how processes share the work."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from .strict import Strict


class OptimConfig(Strict):
    """Muon and AdamW with one learning rate. Defaults are the paper's for 18 layers (Table 10), except for `warmup`."""

    lr: float = Field(7.3e-4, gt=0, description="Peak learning rate.")
    min_lr: float = Field(1e-5, ge=0, description="Learning rate at the end of the cosine schedule.")
    warmup: int = Field(100, ge=0, description="Number of linear warm-up updates.")
    weight_decay: float = Field(0.1, ge=0, description="Weight decay of matrices; vectors and transitions have none.")
    clip: float = Field(1.0, gt=0, description="Gradients are clipped to this global norm.")
    rates: dict[str, float] = Field(
        {}, description="Learning-rate factors by parameter group, as in {transition = 0.5}."
    )


class LoopSampling(Strict):
    """How many loops an update runs: what the layout says or, for shared transitions, a random number."""

    scheme: Literal["fixed", "huginn", "parcae"] = Field("fixed", description="How the number of loops is chosen.")
    mean: float = Field(8.0, gt=0, description="Mean number of loops of a random scheme; huginn adds one.")
    warmup: int = Field(0, ge=0, description="Updates over which the number of loops, or its mean, grows from one.")
    grad_loops: int | None = Field(None, ge=1, description="Backpropagate through this many last loops only.")
    readouts: int = Field(
        0, ge=0, description="Also train on read-outs after this many earlier loops, redrawn every update."
    )
    readout_weight: float = Field(1.0, gt=0, description="Weight of the mean loss of these earlier read-outs.")
    readout_prior: tuple[float, ...] = Field(
        (), description="How often each loop is drawn, as relative weights. Default: equally often."
    )


class TrainConfig(Strict):
    """How a model is trained."""

    steps: int = Field(1000, ge=1, description="Number of updates.")
    seed: int = Field(0, ge=0, lt=2**63, description="Random seed of weights, data order and everything else.")
    data_seed: int | None = Field(None, ge=0, lt=2**63, description="Random seed of the data order. Default: `seed`.")
    seq_len: int = Field(4096, ge=1, description="Tokens per sequence.")
    batch_size: int = Field(1024, ge=1, description="Sequences per update, over all processes.")
    micro_batch: int | None = Field(
        None, ge=1, description="Sequences per forward pass of a process. Default: all of its share."
    )
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="Precision; bf16 is autocast with fp32 weights.")
    compile: bool = Field(False, description="Whether to compile the blocks with torch.compile.")
    activation_checkpointing: bool = Field(False, description="Recompute blocks in the backward pass to save memory.")
    reversible: bool = Field(False, description="Rebuild the loop's states in the backward pass to save memory.")
    loops: LoopSampling = LoopSampling()
    log_every: int = Field(10, ge=1, description="Updates between logged lines.")
    valid_every: int = Field(250, ge=1, description="Updates between validations.")
    valid_batches: int = Field(8, ge=1, description="Number of batches per validation.")
    sample: str | None = Field(
        None, description="A prompt that the model continues at every validation, for the report."
    )
    checkpoint_every: int = Field(250, ge=1, description="Updates between checkpoints.")
    async_checkpoints: bool = Field(
        False, description="Write checkpoints in the background, from copies in host memory."
    )
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_every: int | None = Field(
        None, ge=1, description="Also keep every checkpoint whose step is a multiple of this."
    )
    track: tuple[Literal["trackio", "wandb", "tensorboard"], ...] = Field(
        (), description="Experiment trackers that also get the metrics: one name or a list."
    )

    @field_validator("track", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class ParallelConfig(Strict):
    """How processes share a model; each takes rows of the batch, and the results do not depend on it."""

    replicate: int = Field(
        1, ge=1, description="Number of model copies; set it to the number of nodes to gather within nodes."
    )
    shard: int | None = Field(
        None, ge=1, description="Processes that share one copy. Default: as many as there are per copy."
    )
    expert: int = Field(1, ge=1, description="Neighboring processes that split the experts among them; tokens travel.")
