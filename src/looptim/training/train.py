"""Training: the same command on a laptop and, under torchrun, on many processes.

Everything random is a function of the seed and the step, and nothing else: the batch, the noise of a start, the number
of loops. A run that was killed and resumed therefore has the losses of one that was not, bit for bit on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base.console import is_out_of_memory
from ..base.files import Place
from ..base.memory import keep_memory
from ..config import Config
from ..data import Dataset, open_data, text_of
from ..loop import Loop
from ..loop.registry import NUMERICS, code_of
from ..model import LoopedLM
from ..rundir import RunDir, difference
from . import checkpoint, distributed
from .amx import guard_bf16
from .distributed import World, gone, is_lost
from .gate import check_code
from .maker import OURS, Maker, check_origin
from .mesh import Sizes, open_mesh
from .metrics import RunLog, environment
from .optim import MuonAdamW, describe_groups, parameter_groups
from .samples import check_prompt, write
from .saver import Saver
from .sinks import check_sinks
from .step import Skips, TrainingState, rate_of, update, validate
from .stop import StopRequest


def train(
    config: Config,
    out: str | Path,
    *,
    maker: Maker = OURS,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Train the model of a recipe into the run directory `out`, which is returned.

    `resume` continues from the last complete checkpoint, or begins if there is none; a changed config is refused with
    the difference shown unless `force`. Ctrl-C leaves a checkpoint behind. `maker` makes the model.
    """
    if config.train.dtype == "bf16" and not torch.cuda.is_available():
        guard_bf16()
    folder, world = RunDir(out), distributed.start()

    def check() -> None:
        Sizes.of(config.parallel, world.size)
        world.rows(config.train.batch_size)
        check_sinks(config.train.track)
        folder.check(config, resume=resume, force=force)
        maker.check(config)
        check_code(config, folder, force=force)

    # All that can be known to fail is said now, once, not after hours of packing data.
    world.first_does(check)
    data = _open_together(config, world, progress=progress)
    run = _prepare(config, folder, world, data, maker)
    check_prompt(run)
    if progress and world.first:
        _introduce(run)
    with ExitStack() as held:

        def claim() -> None:
            held.enter_context(folder.claim())
            # The folder is checked again: while the data was packed, another process may have come and gone.
            folder.check(config, resume=resume, force=force)

        world.first_does(claim)
        place = Place(folder.path)
        begin = _restore(run) if resume else Done()
        saver = Saver(folder, config.train, world)
        # A run killed after its last checkpoint leaves files that only the next process to claim it can remove.
        saver.prune(begin.step)
        with StopRequest() as stop, RunLog(folder, config, world, first_step=begin.step, progress=progress) as log:
            # A run that is done keeps the record of the environment that made it.
            if world.first and begin.step < config.train.steps:
                folder.record(config, _environment(run), data.tokenizer)
            try:
                with saver:
                    _loop(run, log, begin, save=partial(_save, run, place, saver), stop=stop)
            except Exception as error:
                if not is_out_of_memory(error):
                    # When one process is lost, torchrun ends all of them.
                    stop.deaf = is_lost(error, world)
                    raise (gone(world, folder.path) if stop.deaf else error) from None
                rows = config.train.micro_batch or config.train.batch_size // world.size
                raise ValueError(
                    f"{rows} sequences of {config.train.seq_len} tokens do not fit the memory at a time; set "
                    "train.micro_batch to fewer, or train.activation_checkpointing=true"
                ) from None
    return folder.path


def _open_together(config: Config, world: World, *, progress: bool) -> Dataset:
    """The data, read and tokenized by all processes; a ValueError if it is too small for a batch."""

    def open_() -> Dataset:
        model, train = config.model, config.train
        show = progress and world.first
        data = open_data(config.data, vocab_size=model.vocab_size, seq_len=train.seq_len, progress=show, crew=world)
        for split in ("train", "valid"):
            data.batch(split, seed=0, step=0, batch_size=train.batch_size, rows=slice(0, 1))
        return data

    return world.all_do(open_)


def _prepare(config: Config, folder: RunDir, world: World, data: Dataset, maker: Maker) -> TrainingState:
    """Build everything; nothing is written."""
    keep_memory()
    model = maker.build(config, world, open_mesh(config.parallel, world))
    model.checkpointing = config.train.activation_checkpointing
    if config.train.compile:
        model.compile_blocks()
    if config.train.reversible:
        model.reverse_loops()
    optim = config.optim
    groups = parameter_groups(model, lr=optim.lr, weight_decay=optim.weight_decay, rates=optim.rates, role=maker.role)
    optimizer = MuonAdamW(groups)
    return TrainingState(config, folder, world, data, model, optimizer, maker)


def _environment(run: TrainingState) -> dict[str, Any]:
    groups = describe_groups(run.optimizer.param_groups)
    code = {"code": code_of(run.config.model.loop.preset), "numerics": NUMERICS}
    origin = run.maker.origin(run.config)
    return {**environment(run.world), **code, "data": run.data.fingerprint, "groups": groups, **origin}


def _introduce(run: TrainingState) -> None:
    """Say what is about to be trained, and which optimizer each parameter went to."""
    print(
        f"{run.folder.path}: {run.maker.describe(run.config, run.model)}, {run.tokens_per_step:,} tokens an update",
        file=sys.stderr,
    )
    for group in describe_groups(run.optimizer.param_groups):
        size = f"{group['parameters']:,} parameters in {group['tensors']} tensors"
        print(f"  {group['name']}: {group['kind']}, {size}, weight decay {group['weight_decay']:g}", file=sys.stderr)
    if run.config.train.compile:
        for loop in uncompiled(run.model):
            print(
                f"  train.compile: blocks are compiled, but {loop.name} runs eagerly: its form is {loop.form}",
                file=sys.stderr,
            )


def uncompiled(model: LoopedLM) -> list[Loop]:
    """The loops of a compiled model whose transitions have no form that can be compiled."""
    return [loop for loop in model.loops if isinstance(loop, Loop) and loop.form != "compiled"]


class Done(NamedTuple):
    """How far a run has come."""

    step: int = 0
    """Updates."""
    tokens: int = 0
    """Tokens trained on; a resumed run may take another number of them in each update."""


def _restore(run: TrainingState) -> Done:
    """Load the last complete checkpoint, if there is one, and return how far it had come."""
    record = checkpoint.load_latest(run.folder, run.model, run.optimizer, run.world)
    if record is None:
        return Done()
    if text_of(record["data"]) != text_of(run.data.fingerprint):
        raise ValueError(
            f"the data of {run.folder.path} has changed since its checkpoint; give it the same data, or a new --out"
        )
    check_origin(run.config, record, run.maker.origin(run.config), run.folder.path)
    if run.world.first:
        _show_changes(run, record["step"])
    # Older checkpoints have no count of tokens; the batch of their runs never changed.
    settings = record["config"]["train"]
    tokens = record.get("tokens", record["step"] * settings["batch_size"] * settings["seq_len"])
    return Done(record["step"], tokens)


def _show_changes(run: TrainingState, step: int) -> None:
    """Say what --force has changed in the config of a run, above all in its schedule, before it is used."""
    if not run.folder.config_file.is_file() or step >= run.config.train.steps:
        return
    before = run.folder.config()
    changes = difference(before, run.config)
    if changes:
        old, new = rate_of(before, step), rate_of(run.config, step)
        rate = f"; the learning rate goes on at {new:.3g} instead of {old:.3g}" if old != new else ""
        print(f"{run.folder.path}: the config has changed ({'; '.join(changes)}){rate}", file=sys.stderr, flush=True)


def _loop(run: TrainingState, log: RunLog, begin: Done, *, save: Callable[[Done], None], stop: StopRequest) -> None:
    settings, tokens = run.config.train, begin.tokens
    flops, skips = _flops(run), Skips(run.world.device)
    if begin.step == 0:
        # The first validation shows what the loops do before anything is learned.
        _validate(run, log, Done())
    for step in range(begin.step, settings.steps):
        now = update(run, step)
        skips.count(now)
        tokens += run.tokens_per_step
        done = step + 1
        if log.is_logged(step):
            values = skips.read(now, last=done == settings.steps)
            log.update(step, values, tokens=tokens, tokens_per_step=run.tokens_per_step, flops_per_token=flops)
        else:
            log.unlogged()
        stopping = stop.agreed(run.world)
        if done % settings.valid_every == 0 or done == settings.steps:
            _validate(run, log, Done(done, tokens))
        if done % settings.checkpoint_every == 0 or done == settings.steps or stopping:
            save(Done(done, tokens))
        if stopping and done < settings.steps:
            raise KeyboardInterrupt


def _validate(run: TrainingState, log: RunLog, done: Done) -> None:
    """Log the loss on held-out text and, where the recipe asks for it, a text that the model writes."""
    values = validate(run)
    sample = None if run.config.train.sample is None else write(run)
    log.validation(done.step, values, done.tokens, sample=sample)


def _flops(run: TrainingState) -> float:
    """Training FLOPs of a token; attention inside documents is counted with the documents of the first batch."""
    settings = run.config.train
    if not run.config.data.mask_attention:
        return run.maker.flops(run.config, None)
    rows = run.world.rows(settings.batch_size)
    batch = run.data.batch("train", seed=settings.seed, step=0, batch_size=settings.batch_size, rows=rows)
    return run.maker.flops(run.config, batch.document_lengths())


def _save(run: TrainingState, place: Place, saver: Saver, done: Done) -> None:
    run.world.first_does(place.check)
    config = run.config.model_dump(mode="json")
    origin = run.maker.origin(run.config)
    record = {"tokens": done.tokens, "config": config, "data": run.data.fingerprint, **environment(run.world), **origin}
    saver.save(done.step, run.model, run.optimizer, record)
