"""One update and one validation of a run, on this process's share of the batch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor

from ..config import Config, LoopSampling
from ..data import Batch, Dataset
from ..loop import Depth, Loop, trace
from ..loop.depth import Fixed, PerSequence
from ..model import IGNORE, LoopedLM, MoE, Output, balance_update
from ..rundir import RunDir
from .distributed import World
from .maker import OURS, Maker
from .mesh import synchronize_gradients
from .optim import MuonAdamW, clip_gradients, learning_rate, set_rate

IN_A_ROW = 3
"""After this many non-finite updates in a row, a run has diverged."""


class DivergedError(ValueError):
    """Raised when losses or gradients stay non-finite."""


@final
@dataclasses.dataclass(frozen=True)
class TrainingState:
    """Everything that one process of a training run holds."""

    config: Config
    folder: RunDir
    world: World
    data: Dataset
    model: LoopedLM
    optimizer: MuonAdamW
    maker: Maker = OURS

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.train.seq_len


def rate_of(config: Config, step: int) -> float:
    """The learning rate of a step, according to the recipe."""
    optim = config.optim
    return learning_rate(step, peak=optim.lr, minimum=optim.min_lr, warmup=optim.warmup, total=config.train.steps)


@final
@dataclasses.dataclass(frozen=True)
class Update:
    """The numbers of an update to log, on the device; only `read` waits for them."""

    step: int
    lr: float
    loss: Tensor
    norm: Tensor
    skipped: Tensor
    """Whether the update was skipped because its loss or gradient was not finite, as 1.0 or 0.0."""
    unbalanced: dict[str, Tensor]
    """The load of the busiest expert over the mean load, by layer and visit."""

    def read(self, *counts: Tensor) -> tuple[dict[str, Any], list[float]]:
        """Read the numbers to log, and those of `counts`, in one transfer."""
        parts = [self.loss, self.norm, *counts, *self.unbalanced.values()]
        numbers = torch.cat([part.detach().double().flatten() for part in parts]).tolist()
        loss, norm, *rest = numbers
        counted, rest = rest[: len(counts)], rest[len(counts) :]
        values = {"loss": loss, "lr": self.lr, "grad_norm": norm}
        if self.unbalanced:
            visits = [len(ratios) for ratios in self.unbalanced.values()]
            starts = itertools.accumulate(visits, initial=0)
            layers = zip(self.unbalanced, starts, visits, strict=False)
            loads = {name: [round(ratio, 4) for ratio in rest[at : at + n]] for name, at, n in layers}
            values |= {"moe_load_max": max(max(ratios) for ratios in loads.values()), "moe_load": loads}
        return values, counted


def update(run: TrainingState, step: int) -> Update:
    """One optimizer update, from the global batch of `step`.

    Nothing here waits for the device, so the host can prepare the next update meanwhile. An update with a non-finite
    loss or gradient changes nothing.
    """
    settings, optim, world = run.config.train, run.config.optim, run.world
    # All randomness in the forward pass depends only on seed, step and rank, so no generator needs saving.
    torch.manual_seed(_mix(settings.seed, step, world.rank))
    rows = world.rows(settings.batch_size)
    order = settings.seed if settings.data_seed is None else settings.data_seed
    batch = run.data.batch("train", seed=order, step=step, batch_size=settings.batch_size, rows=rows)
    lr = rate_of(run.config, step)
    set_rate(run.optimizer.param_groups, lr, optim.rates)
    total, loads = accumulate(run, batch.to(world.device), step)
    norm = clip_gradients(run.model.parameters(), optim.clip)
    skipped = (~(total.isfinite() & norm.isfinite())).float()
    run.optimizer.step(skip=skipped)
    run.optimizer.zero_grad()
    return Update(step, lr, total, norm, skipped, _balance(run, loads, skipped))


@final
class Skips:
    """Counts skipped updates on the device: those since the last report, and those in a row."""

    def __init__(self, device: torch.device):
        self.since, self.row = torch.zeros((), device=device), torch.zeros((), device=device)

    def count(self, done: Update) -> None:
        self.since = self.since + done.skipped
        self.row = (self.row + 1) * done.skipped

    def read(self, done: Update, *, last: bool) -> dict[str, Any]:
        """The numbers to log. Raises DivergedError if too many updates in a row, or the last one, were skipped."""
        values, (since, row) = done.read(self.since, self.row)
        self.since = torch.zeros_like(self.since)
        if row >= IN_A_ROW or (row and last):
            what = "loss" if not math.isfinite(values["loss"]) else "gradient"
            before = f", nor were those of {row - 1:.0f} updates before it" if row > 1 else ""
            raise DivergedError(
                f"the {what} of step {done.step + 1} is not finite{before}; the last checkpoint, if any, is kept; "
                "lower optim.lr"
            )
        return values if not since else {**values, "skipped": int(since)}


def accumulate(run: TrainingState, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of the mean loss over the global batch, by micro-batches; returns the loss and the experts' loads."""
    settings, world = run.config.train, run.world
    total_targets = world.sum((batch.targets != IGNORE).sum())
    loads: dict[str, Tensor] = {}
    loss = torch.zeros((), device=world.device)
    first = world.rows(settings.batch_size).start
    pieces = _pieces(run, batch)
    for index, piece in enumerate(pieces):
        synchronize_gradients(run.model, last=index == len(pieces) - 1)
        rows = len(piece.tokens)
        depth = sample_loops(run.config, step, slice(first, first + rows))
        first += rows
        loops = settings.loops
        out = _loss(run, piece, depth=depth, grad_loops=loops.grad_loops, early_weight=loops.readout_weight)
        # Every target of the global batch counts equally, wherever it fell; FSDP then sums over processes.
        share = (piece.targets != IGNORE).sum() / total_targets
        auxiliary = (out.loss - out.supervised) * (rows / settings.batch_size)
        (share * out.supervised + auxiliary).backward()
        loss += share * out.cross_entropy.detach()
        for name, load in out.loads.items():
            loads[name] = loads[name] + load if name in loads else load
    return world.sum(loss), {name: world.sum(load) for name, load in loads.items()}


def _pieces(run: TrainingState, batch: Batch) -> list[Batch]:
    """This process's rows, in micro-batches that fit its memory."""
    return batch.split(run.config.train.micro_batch or len(batch.tokens))


def _loss(run: TrainingState, batch: Batch, **options: Any) -> Output:
    """The forward pass of a micro-batch, in the precision and with the attention that the recipe asks for."""
    documents = batch.documents if run.config.data.mask_attention else None
    bf16 = run.config.train.dtype == "bf16"
    with torch.autocast(run.world.device.type, torch.bfloat16) if bf16 else nullcontext():
        return run.model.loss(batch.tokens, batch.targets, documents=documents, **options)


def sample_loops(config: Config, step: int, rows: slice) -> Depth | None:
    """The depth of a micro-batch: the layout's, which is None, or Huginn's or Parcae's random one.

    Huginn: `Poisson(LogNormal) + 1`, the log-normal of mean `mean` and sigma 1/2, one number for the batch. Parcae:
    `max(1, Poisson(mean))`, one for each sequence: `rows` says which of the global batch, so that neither micro-batches
    nor processes change what is drawn.
    """
    loops = config.train.loops
    # A curriculum begins with one loop, and has the whole number, or mean, with the last update of its warm-up.
    share = min(1.0, (step + 1) / loops.warmup) if loops.warmup else 1.0
    if loops.scheme == "fixed" and not loops.readouts and share == 1.0:
        return None
    generator = torch.Generator().manual_seed(_mix(config.train.seed, step, 0))
    if loops.scheme == "fixed":
        steps = next(segment.loops for segment in config.model.segments if segment.loops is not None)
        steps = math.ceil(steps * share)
        return Fixed(steps, _sample_reads(loops, steps, generator))
    if loops.scheme == "huginn":
        sigma = 0.5
        normal = torch.randn((), generator=generator).item()
        rate = math.exp(sigma * normal + math.log(loops.mean * share) - sigma**2 / 2)
        steps = int(torch.poisson(torch.tensor(rate), generator=generator)) + 1
        return Fixed(steps, _sample_reads(loops, steps, generator))
    rates = torch.full((config.train.batch_size,), loops.mean * share)
    whole = torch.poisson(rates, generator=generator).clamp_min(1).long()
    # Every micro-batch and process runs as long as the longest of the global batch, as FSDP and the loads require.
    return PerSequence(whole[rows], total=int(whole.max()))


def _sample_reads(loops: LoopSampling, steps: int, generator: torch.Generator) -> tuple[int, ...]:
    """The numbers of earlier loops after which the state is also read out, drawn without repetition."""
    weights = torch.ones(steps - 1)
    given = torch.tensor(loops.readout_prior[: steps - 1])
    if len(given):
        weights = torch.cat([given, torch.zeros(steps - 1 - len(given))])
    number = min(loops.readouts, int((weights > 0).sum()))
    if not number:
        return ()
    return tuple(sorted((torch.multinomial(weights, number, generator=generator) + 1).tolist()))


def _balance(run: TrainingState, loads: dict[str, Tensor], skipped: Tensor) -> dict[str, Tensor]:
    """Move the router biases once, by the loads of the global batch; returns how unbalanced the experts were."""
    unbalanced = {}
    for name, load in loads.items():
        moe = run.model.get_submodule(name)
        assert isinstance(moe, MoE)
        pooled = run.config.model.balance == "pooled"
        # A sampled number of loops may differ from the number of visits that have biases.
        rows = load.sum(0, keepdim=True) if pooled else load[: len(moe.bias)]
        seen = moe.bias[: len(rows)]
        moved = balance_update(seen, rows, run.config.model.balance_rate)
        seen.copy_(torch.where(skipped.bool(), seen, moved))
        unbalanced[name] = load.amax(-1) / load.float().mean(-1)
    return unbalanced


@torch.no_grad()
def validate(run: TrainingState) -> dict[str, Any]:
    """The mean loss over the first validation batches, and statistics of the loops on their first rows."""
    settings, world = run.config.train, run.world
    rows = world.rows(settings.batch_size)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    looped = any(isinstance(module, Loop) for module in run.model.modules())
    values: dict[str, Any] = {}
    solved: list[Tensor] = []
    run.model.eval()
    for index in range(settings.valid_batches):
        batch = run.data.batch("valid", seed=settings.seed, step=index, batch_size=settings.batch_size, rows=rows)
        for piece in _pieces(run, batch.to(world.device)):
            with trace(run.model) if looped and not values else nullcontext() as seen:
                out = _loss(run, piece)
            counted = (piece.targets != IGNORE).sum()
            total += torch.stack([out.cross_entropy.double() * counted, counted.double()])
            if seen is not None:
                values = _loop_statistics(seen)
            asked = run.data.difficulty_of(piece.tokens)
            if asked is not None:
                solved.append(count_right(run.model(piece.tokens), piece.targets, asked, run.data.levels))
    run.model.train()
    loss, counted = world.sum(total).tolist()
    if solved:
        right, asked = world.sum(torch.stack(solved).sum(0))
        values["valid_accuracy"] = [round(share, 4) for share in (right / asked.clamp_min(1)).tolist()]
    return {"valid_loss": loss / counted, **values}


def count_right(logits: Tensor, targets: Tensor, difficulty: Tensor, levels: range) -> Tensor:
    """By difficulty: the number of right answers, and of answers asked for; (2, levels)."""
    asked = difficulty >= 0
    right = (logits.argmax(-1) == targets) & asked
    places = difficulty - levels.start
    return torch.stack([torch.bincount(places[which], minlength=len(levels)) for which in (right, asked)])


def _loop_statistics(seen: Any) -> dict[str, list[float]]:
    """Means over tokens, one number per loop."""

    def means(tensors: list[Tensor]) -> list[float]:
        return [round(t.float().mean().item(), 6) for t in tensors]

    return {
        "step_size": means(seen.step_size),
        "decay": means(seen.decay),
        "state_norm": means([Y.float().square().mean((-2, -1)).sqrt() for Y in seen.state]),
        "objective": means(seen.objective),
    }


def _mix(seed: int, step: int, rank: int) -> int:
    """Combine three numbers into one seed; for generators that use only 32 bits, ranks repeat after 65,535 steps."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2**64
