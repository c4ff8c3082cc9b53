"""Checkpoints that are complete or absent: written aside, synced, renamed; the last complete one is found by itself."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ..base.files import sync, write_whole
from ..model import LoopedLM
from .distributed import World

# DCP says so at every save and load of a single process, which is what we want.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

RECORD = "checkpoint.json"
"""Written last; a folder without it is not a checkpoint."""


def folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"step_{step:06d}"


def save(run: Path, step: int, model: LoopedLM, optimizer: Optimizer, record: dict[str, Any], world: World) -> Path:
    """Write the checkpoint of `step` (updates done), so that a crash at any instant leaves it whole or not there."""
    final = folder(run, step)
    aside = final.with_name(f".{final.name}.partial")
    if world.first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    world.wait()
    try:
        weights, state = get_state_dict(model, optimizer)
        # Shard files are synced by DCP's writer; the record and the folders by us.
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(aside), no_dist=world.size == 1)
        if world.first:
            write_whole(aside / RECORD, json.dumps({**record, "step": step}, indent=2))
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
            sync(final.parent)
    except (Exception, CheckpointException) as error:
        if world.first:
            shutil.rmtree(aside, ignore_errors=True)
        if isinstance(_inner(error), KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise OSError(f"could not write the checkpoint of step {step} to {final.parent}: {_cause(error)}") from error
    world.wait()
    return final


def load(path: Path, model: LoopedLM, optimizer: Optimizer | None, world: World) -> dict[str, Any]:
    """Fill the model, and the optimizer if given, from a checkpoint, however many processes wrote it."""
    record = read_record(path)
    metadata = path / ".metadata"
    # DCP would print the tracebacks of two attempts to read it.
    if not metadata.is_file() or not metadata.stat().st_size:
        raise ValueError(f"checkpoint {path} is damaged ({metadata.name} is missing or empty); {_way_out(path)}")
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
        raise ValueError(f"checkpoint {path} is damaged ({_cause(error)}); {_way_out(path)}") from error
    set_state_dict(
        model,
        optimizer if optimizer is not None else (),
        model_state_dict=weights,
        optim_state_dict=state if optimizer is not None else {},
    )
    return record


def _way_out(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    others = [other.name for other in checkpoints(path.parents[1]) if other != path]
    return f"delete it, and {others[-1]} is used instead" if others else "delete it to begin anew"


def read_record(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself: step, config, versions, data."""
    try:
        record = json.loads((path / RECORD).read_text())
        if not isinstance(record, dict) or not record.keys() >= {"step", "data"}:
            raise ValueError("it has no step or no data")
    except ValueError as error:
        raise ValueError(f"checkpoint {path} is damaged ({RECORD}: {error}); {_way_out(path)}") from None
    return record


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first; folders of other names are somebody else's."""
    found = [path.parent for path in (run / "checkpoints").glob(f"step_*/{RECORD}")]
    return sorted((path for path in found if re.fullmatch(r"step_\d{6,}", path.name)), key=_step)


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    return next(reversed(checkpoints(run)), None)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def prune(run: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Delete all checkpoints but the newest `keep_last` and multiples of `keep_every`, and broken leftovers."""
    for leftover in (run / "checkpoints").glob(".step_*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    for path in checkpoints(run)[:-keep_last]:
        if keep_every is None or _step(path) % keep_every:
            # Renamed first: killed in between, it must not look complete.
            doomed = path.with_name(f".{path.name}.partial")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _inner(error: BaseException) -> BaseException:
    """What really went wrong, below what DCP wraps around it."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _cause(error: BaseException) -> str:
    error = _inner(error)
    return (str(error) or type(error).__name__).strip().splitlines()[0]
