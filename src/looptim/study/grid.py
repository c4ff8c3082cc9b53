"""Running a grid: worker processes train what is not finished, the parent shows how far the whole is."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .. import checkpoint, rundir
from ..config import Config
from ..evaluate import evaluate
from ..evaluate.progress import duration
from ..train import train
from ..updates import DivergedError
from .spec import Cell, Plan

PROBLEMS = 200
"""Held-out problems of a synthetic task that a model is asked."""


def task_of(config: Config) -> str | None:
    """The synthetic task a run learns, which is then also measured by generation."""
    kind, _, name = config.data.source.partition(":")
    return name if kind == "synthetic" else None


def is_finished(cell: Cell, runs: Path) -> bool:
    """Whether a run has its last checkpoint and, for a task, its exact match."""
    folder = runs / cell.name
    last = checkpoint.latest(folder)
    task = task_of(cell.config)
    trained = last is not None and checkpoint.read_record(last)["step"] == cell.config.train.steps
    return trained and (task is None or (folder / "eval" / f"{task}.limit{PROBLEMS}.json").is_file())


def run_grid(plan: Plan, runs: Path, *, jobs: int, progress: bool) -> dict[str, str]:
    """Train every run that is not finished, `jobs` at a time; why those failed that diverged, by the run's name."""
    waiting = list({cell.name: cell for cell in plan.cells if not is_finished(cell, runs)}.values())
    for cell in waiting:
        rundir.check(runs / cell.name, cell.config, resume=True, force=False)
    failures: dict[str, str] = {}
    if not waiting:
        return failures
    threads = max(1, torch.get_num_threads() // jobs)
    spawn = multiprocessing.get_context("spawn")
    meter = Meter(plan, waiting, runs, show=progress)
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_start_worker, initargs=(os.getpid(), threads))
    try:
        futures = {pool.submit(_run, cell.config.model_dump(), str(runs / cell.name)): cell for cell in waiting}
        with meter:
            _follow(futures, meter, failures)
    except BrokenProcessPool:
        raise ValueError(
            "a worker was killed, perhaps for want of memory; the same command continues, fewer --jobs need less"
        ) from None
    except KeyboardInterrupt:
        # What is being trained then leaves a checkpoint.
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return failures


def _follow(futures: Mapping[Future[str | None], Cell], meter: Meter, failures: dict[str, str]) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            cell, failure = futures[future], future.result()
            if failure is not None:
                failures[cell.name] = failure
            meter.finished(cell, failure)
        meter.tick()


def _start_worker(parent: int, threads: int) -> None:
    torch.set_num_threads(threads)
    # Ctrl-C is for the study, which passes it on: a run asked twice would stop without a checkpoint.
    if hasattr(os, "setpgrp"):
        os.setpgrp()

    def watch() -> None:
        # A worker whose study was killed would go on holding its run; checkpoints are written whole, so it may just go.
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(config: dict[str, Any], folder: str) -> str | None:
    """Train one run, and ask it its task; the reason if it diverged."""
    resolved = Config(**config)
    try:
        train(resolved, folder, resume=True, progress=False)
    except DivergedError as error:
        return str(error)
    except KeyboardInterrupt:
        # The checkpoint is written. Returning would be taken as being free for the next run.
        os._exit(130)
    task = task_of(resolved)
    if task is not None:
        evaluate(folder, tasks=[task], limit=PROBLEMS, batch_size=100, quiet=True)
    return None


@final
class Meter:
    """How far the whole grid is, in FLOPs, since runs of different depth do not take equally long."""

    def __init__(self, plan: Plan, waiting: list[Cell], runs: Path, *, show: bool):
        self.runs, self.show = runs, show
        self.cells = {cell.name: cell for cell in plan.cells}
        self.open = {cell.name for cell in waiting}
        self.cost = {cell.name: plan.flops(cell.variant) / cell.config.train.steps for cell in plan.cells}
        self.start, self.first = time.monotonic(), self._done()
        self.bar: Progress | None = None

    def __enter__(self) -> Meter:
        if self.show and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("", total=self._total())
            self.bar.start()
        elif self.show:
            print(f"{len(self.cells) - len(self.open)} of {len(self.cells)} runs are done", file=sys.stderr)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def finished(self, cell: Cell, failure: str | None) -> None:
        self.open.discard(cell.name)
        if not self.show:
            return
        said = failure or f"validation loss {_last_line(self.runs / cell.name, 'valid_loss')['valid_loss']:.4f}"
        line = f"{cell.variant}, seed {cell.seed}: {said} ({self._so_far()})"
        self.bar.console.print(line) if self.bar else print(line, file=sys.stderr, flush=True)

    def tick(self) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=self._done(), description=self._so_far())

    def _so_far(self) -> str:
        done = self._done()
        share, elapsed = done - self.first, time.monotonic() - self.start
        left = f", {duration(elapsed * (self._total() - done) / share)} left" if share > 0 and self.open else ""
        return f"{len(self.cells) - len(self.open)} of {len(self.cells)} runs{left}"

    def _total(self) -> float:
        return sum(self.cost[name] * cell.config.train.steps for name, cell in self.cells.items())

    def _done(self) -> float:
        steps = {
            name: _last_line(self.runs / name, "loss").get("step", 0) if name in self.open else cell.config.train.steps
            for name, cell in self.cells.items()
        }
        return sum(self.cost[name] * number for name, number in steps.items())


def _last_line(folder: Path, key: str) -> dict[str, Any]:
    """The last whole line of the metrics that has `key`; runs being trained are read while they write."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if key in record:
            return record
    return {}
