"""The weights and optimizer state of a run, saved and loaded by any number of processes."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.api import CheckpointException

from ..base.files import remove_whole, sweep, whole_folder
from ..model import LoopedLM
from ..rundir import RECORD, DamagedError, RunDir, read_record, step_of
from .distributed import World
from .optim import MuonAdamW
from .pickled import PICKLE, PickledReader
from .storage import TensorReader, TensorWriter, check_digests, read_digests

# A single process is intended, but DCP would warn about it at every save and load.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def save(run: RunDir, step: int, model: LoopedLM, optimizer: MuonAdamW, record: dict[str, Any], world: World) -> Path:
    """Write the checkpoint of `step` (the updates done); after a crash at any instant it is complete or absent."""
    return write(run, step, tensors_of(model, optimizer), record, world)


def write(run: RunDir, step: int, tensors: dict[str, Tensor], record: dict[str, Any], world: World) -> Path:
    """The same for given tensors, by processes that wait for each other through `world`."""
    final = run.checkpoint(step)
    # All processes write into one folder, and only one run at a time writes here.
    aside = final.with_name(f".{final.name}.partial")
    writer = TensorWriter(aside, {RECORD: json.dumps({**record, "step": step}, indent=2)})
    try:
        with whole_folder(final, replace=True, aside=aside) if world.first else nullcontext():
            world.wait()
            dcp.save(tensors, storage_writer=writer, no_dist=world.size == 1, process_group=world.waiting)
    except (Exception, CheckpointException) as error:
        if isinstance(_inner(error), KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise ValueError(
            f"could not write the checkpoint of step {step} to {final.parent}: {_cause(error)}; free space, --resume"
        ) from error
    world.wait()
    return final


def load_latest(run: RunDir, model: LoopedLM, optimizer: MuonAdamW | None, world: World) -> dict[str, Any] | None:
    """Load the newest undamaged checkpoint, after naming the damaged ones; returns its record, or None."""
    paths = run.checkpoints()[::-1]
    for path, before in zip(paths, [*paths[1:], None], strict=False):
        try:
            return load(path, model, optimizer, world)
        except DamagedError as error:
            if before is None:
                raise
            if world.first:
                print(f"{error.what}; {before.name} is used instead", file=sys.stderr, flush=True)
    return None


def load(path: Path, model: LoopedLM, optimizer: MuonAdamW | None, world: World) -> dict[str, Any]:
    """Fill the model, and the optimizer if given, from a checkpoint that any number of processes wrote."""
    target = tensors_of(model, optimizer)
    old = (path / PICKLE).is_file()
    reader = PickledReader(path) if old else TensorReader(path)
    problem = None if old else _problem(path, weights_only=optimizer is None, world=world)
    if problem is not None:
        raise DamagedError(path, problem)
    record = read_record(path)
    _check_names(path, reader, target)
    try:
        dcp.load(target, storage_reader=reader, no_dist=world.size == 1)
    except (Exception, CheckpointException) as error:
        cause = _inner(error)
        if isinstance(cause, ValueError) and "ize mismatch" in str(cause):
            raise ValueError(f"checkpoint {path} does not fit the model of this config: {_cause(error)}") from error
        raise DamagedError(path, _cause(error)) from error
    return record


def tensors_of(model: LoopedLM, optimizer: MuonAdamW | None) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, for writing and for reading. Settings come from the config."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    if optimizer is not None:
        optimizer.prepare()
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter, {})
            tensors |= {f"optimizer.state.{name}.{key}": tensor for key, tensor in state.items()}
    return tensors


def _problem(path: Path, *, weights_only: bool, world: World) -> str | None:
    """What is wrong with the files of a checkpoint; every process checks its share of them."""
    try:
        names = [name for name in sorted(read_digests(path)) if not (weights_only and name.startswith("optimizer"))]
        check_digests(path, names[world.rank :: world.size])
        problem = None
    except (OSError, ValueError) as error:
        problem = _cause(error)
    return next((each for each in world.gather(problem) if each is not None), None)


def _check_names(path: Path, reader: StorageReader, target: dict[str, Tensor]) -> None:
    """Check that a checkpoint has all the requested tensors and no other tensors of the model."""
    try:
        there = reader.read_metadata().state_dict_metadata.keys()
    except Exception as error:
        # A file that somebody else wrote may contain anything.
        raise DamagedError(path, _cause(error)) from error
    for which, names in (
        ("has no", target.keys() - there),
        ("also has", {name for name in there - target.keys() if name.startswith("model.")}),
    ):
        if names:
            raise ValueError(f"checkpoint {path} does not fit the model of this config: it {which} {min(names)}")


def prune(run: RunDir, *, keep_last: int, keep_every: int | None, step: int | None = None) -> None:
    """Delete leftovers of killed processes, and checkpoints but the newest `keep_last` and multiples of `keep_every`.

    Only the holder of the run may do this. Checkpoints after `step`, the current one, belong to an abandoned future.
    """
    sweep(run.path)
    for leftover in run.checkpoint(0).parent.glob(".step_*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    paths = [path for path in run.checkpoints() if step is None or step_of(path) <= step]
    for path in paths[:-keep_last]:
        if keep_every is None or step_of(path) % keep_every:
            remove_whole(path)


def _inner(error: BaseException) -> BaseException:
    """The actual cause, below the errors that DCP wraps around it."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _cause(error: BaseException) -> str:
    error = _inner(error)
    return (str(error) or type(error).__name__).strip().splitlines()[0]
