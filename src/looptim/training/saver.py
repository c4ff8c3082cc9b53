"""Checkpoints while the training goes on: a thread writes copies; each is complete or absent, as always."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..config import TrainConfig
from ..rundir import RunDir
from . import checkpoint
from .distributed import PATIENCE, World
from .optim import MuonAdamW


@final
class Saver:
    """Writes the checkpoints of a run and prunes old ones, one at a time; leaving the context waits for the last.

    With `train.async_checkpoints` a thread writes copies in host memory; an error in it is raised at the next
    checkpoint.
    """

    def __init__(self, run: RunDir, settings: TrainConfig, world: World):
        self.run, self.settings, self.world = run, settings, world
        self.thread: ThreadPoolExecutor | None = None
        self.writing: Future[Path] | None = None
        if settings.async_checkpoints:
            self.thread = ThreadPoolExecutor(1)
            self.stager = DefaultStager(StagingOptions(False, False, False, False))
            if world.size > 1:
                # Writers meet in their own group, because the training's group is busy with other things.
                group = dist.new_group(backend="gloo", timeout=PATIENCE)
                self.world = dataclasses.replace(world, waiting=group)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.wait()
        except Exception:
            # If a process is lost, no checkpoint gets finished, and that error was already reported.
            if error is None:
                raise
        finally:
            if self.thread is not None:
                self.thread.shutdown()

    def save(self, step: int, model: Any, optimizer: MuonAdamW, record: dict[str, Any]) -> None:
        """Write the checkpoint of `step` (the updates done), or start writing it."""
        self.wait()
        tensors = checkpoint.tensors_of(model, optimizer)
        if self.thread is None:
            self.world.all_do(lambda: self._write(step, tensors, record))
        else:
            copies = self.stager.stage(tensors)
            assert isinstance(copies, dict)
            self.writing = self.thread.submit(self._write, step, copies, record)

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        writing, self.writing = self.writing, None
        if writing is not None:
            self.world.all_do(writing.result)

    def prune(self, step: int) -> None:
        """Delete what is not to be kept, after the checkpoint of `step`."""
        keep = {"keep_last": self.settings.keep_last, "keep_every": self.settings.keep_every}
        if self.world.first:
            checkpoint.prune(self.run, **keep, step=step)

    def _write(self, step: int, tensors: dict[str, Any], record: dict[str, Any]) -> Path:
        path = checkpoint.write(self.run, step, tensors, record, self.world)
        self.prune(step)
        return path
