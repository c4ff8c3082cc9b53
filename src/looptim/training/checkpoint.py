"""The weights and the optimizer's state of a run, saved and loaded by however many processes."""

from __future__ import annotations

import json
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ..base.files import remove_whole, whole_folder, write_whole
from ..model import LoopedLM
from ..rundir import RECORD, RunDir, damaged, read_record, step_of
from .distributed import World

# A single process is what we want, and DCP would warn of it at every save and load.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def save(run: RunDir, step: int, model: LoopedLM, optimizer: Optimizer, record: dict[str, Any], world: World) -> Path:
    """Write the checkpoint of `step` (updates done), so that a crash at any instant leaves it whole or not there."""
    final = run.checkpoint(step)
    # All processes write into one folder; only one run at a time writes here.
    aside = final.with_name(f".{final.name}.partial")
    try:
        with whole_folder(final, replace=True, aside=aside) if world.first else nullcontext():
            world.wait()
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(aside), no_dist=world.size == 1)
            if world.first:
                write_whole(aside / RECORD, json.dumps({**record, "step": step}, indent=2))
    except (Exception, CheckpointException) as error:
        if isinstance(_inner(error), KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise ValueError(
            f"could not write the checkpoint of step {step} to {final.parent}: {_cause(error)}; make room, and --resume"
        ) from error
    world.wait()
    return final


def load(path: Path, model: LoopedLM, optimizer: Optimizer | None, world: World) -> dict[str, Any]:
    """Fill the model, and the optimizer if given, from a checkpoint, however many processes wrote it."""
    record = read_record(path)
    metadata = path / ".metadata"
    # Where it is missing, DCP would print the tracebacks of two attempts to read it.
    if not metadata.is_file() or not metadata.stat().st_size:
        raise damaged(path, f"{metadata.name} is missing or empty")
    weights, state = get_state_dict(model, optimizer if optimizer is not None else ())
    target = {"model": weights, "optimizer": state} if optimizer is not None else {"model": weights}
    try:
        dcp.load(target, checkpoint_id=str(path), no_dist=world.size == 1)
    except (Exception, CheckpointException) as error:
        cause = _inner(error)
        if isinstance(cause, (ValueError, RuntimeError)) and (
            "ize mismatch" in str(cause) or "Missing key" in str(cause)
        ):
            raise ValueError(f"checkpoint {path} does not fit the model of this config: {_cause(error)}") from error
        raise damaged(path, _cause(error)) from error
    set_state_dict(
        model,
        optimizer if optimizer is not None else (),
        model_state_dict=weights,
        optim_state_dict=state if optimizer is not None else {},
    )
    return record


def prune(run: RunDir, *, keep_last: int, keep_every: int | None) -> None:
    """Delete all checkpoints but the newest `keep_last` and multiples of `keep_every`, and broken leftovers."""
    for leftover in run.checkpoint(0).parent.glob(".step_*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    for path in run.checkpoints()[:-keep_last]:
        if keep_every is None or step_of(path) % keep_every:
            remove_whole(path)


def _inner(error: BaseException) -> BaseException:
    """What really went wrong, below what DCP wraps around it."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _cause(error: BaseException) -> str:
    error = _inner(error)
    return (str(error) or type(error).__name__).strip().splitlines()[0]
