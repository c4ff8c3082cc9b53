"""How a model is trained: the optimizer, the updates, and how processes share the work."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from .strict import Strict


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


class ParallelConfig(Strict):
    """How processes share a model, whatever their number: all have rows of the batch; the results do not change."""

    replicate: int = Field(1, ge=1, description="Copies of the model; nodes, to gather parameters inside a node only.")
    shard: int | None = Field(None, ge=1, description="Processes that share a copy; by default all there are for one.")
    expert: int = Field(1, ge=1, description="Of those, neighbors that share the experts; tokens travel to them.")
