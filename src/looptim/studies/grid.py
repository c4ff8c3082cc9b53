"""Running a grid: worker processes train what is not finished, the parent shows how far the whole is."""

from __future__ import annotations

import _thread
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .. import rundir
from ..base.console import duration
from ..base.files import write_whole
from ..config import Config
from ..evaluation import evaluate
from ..evaluation.tasks import COUNT as PROBLEMS
from ..training import checkpoint
from ..training.step import DivergedError
from ..training.train import train
from .spec import Cell, Plan

DIVERGED = "diverged.txt"
"""The file of a run that says why it came to no end."""


def task_of(config: Config) -> str | None:
    """The synthetic task a run learns, which is then also measured by generation."""
    kind, _, name = config.data.source.partition(":")
    return name if kind == "synthetic" else None


def is_finished(cell: Cell, runs: Path) -> bool:
    """Whether a run has its last checkpoint and, for a task, its exact match.

    One that came without checkpoints, out of the archive of a study, has its last validation.
    """
    folder = runs / cell.name
    last = checkpoint.latest(folder)
    record = _last_line(folder, "valid_loss") if last is None else checkpoint.read_record(last)
    answers = answers_of(cell)
    return record.get("step") == cell.config.train.steps and (answers is None or (folder / answers).is_file())


def divergence(cell: Cell, runs: Path) -> str | None:
    """Why a run came to no end: it would each time, so that it is not tried again."""
    file = runs / cell.name / DIVERGED
    return file.read_text() if file.is_file() else None


def is_settled(cell: Cell, runs: Path) -> bool:
    """Whether nothing is left to do for a run."""
    return is_finished(cell, runs) or divergence(cell, runs) is not None


def answers_of(cell: Cell) -> str | None:
    """The file of a run that has its exact match, where it learns a task."""
    task = task_of(cell.config)
    return task and f"eval/{task}.limit{PROBLEMS}.json"


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Schedulers stop a job with SIGTERM, which would end the study and leave its runs without a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_grid(plan: Plan, runs: Path, *, jobs: int, progress: bool) -> None:
    """Train every run that is not settled, `jobs` at a time."""
    waiting = list({cell.name: cell for cell in plan.cells if not is_settled(cell, runs)}.values())
    if not waiting:
        return
    threads = max(1, torch.get_num_threads() // jobs)
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    meter = Meter(plan, waiting, runs, show=progress)
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_start_worker, initargs=(os.getpid(), threads, stop))
    try:
        with meter:
            _follow(waiting, lambda cell: pool.submit(_run, cell, runs), meter)
    except BrokenProcessPool:
        raise ValueError(
            "a worker was killed, perhaps for want of memory; the same command continues, fewer --jobs need less"
        ) from None
    except BaseException:
        # Ctrl-C, or a run that failed: what is being trained beside it then leaves a checkpoint.
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _follow(waiting: list[Cell], submit: Callable[[Cell], Future[None]], meter: Meter) -> None:
    futures = {submit(cell): cell for cell in waiting}
    while futures:
        done, _ = wait(futures, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            cell = futures.pop(future)
            try:
                future.result()
            except rundir.HeldError:
                # Another study that shares the run is at it, and what it does counts for us too: others come first.
                futures[submit(cell)] = cell
                continue
            meter.finished(cell)
        meter.tick()


_stop: Event
"""Of a worker: set when its study stops."""


def _start_worker(parent: int, threads: int, stop: Event) -> None:
    global _stop
    _stop = stop
    torch.set_num_threads(threads)
    # Ctrl-C is for the study, which passes it on: a run asked twice would stop without a checkpoint.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    # Between runs there is nothing to stop, and a worker that ends breaks the pool for the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        asked = False
        # A worker whose study was killed would go on holding its run; checkpoints are written whole, so it may just go.
        while os.getppid() == parent:
            if stop.is_set() and not asked:
                asked = True
                _thread.interrupt_main()
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(cell: Cell, runs: Path) -> None:
    """Train one run, and ask it its task. A HeldError if another study is at it."""
    if is_settled(cell, runs):
        # By another study that shares it, since this one looked.
        return
    folder = runs / cell.name
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if _stop.is_set():
            raise KeyboardInterrupt
        # Asked before the data is opened, since a run that is held is asked for again and again.
        with rundir.claimed(folder):
            pass
        train(cell.config, folder, resume=True, progress=False)
        task = task_of(cell.config)
        if task is not None:
            _ask(task, folder)
    except DivergedError as error:
        write_whole(folder / DIVERGED, str(error))
    except rundir.HeldError:
        # Where all that is left is held, a study should not spend its time on asking.
        time.sleep(2)
        raise
    except KeyboardInterrupt:
        if not _stop.is_set():
            # Not the study but the pool wants this, which is broken and waits for its workers to end.
            os._exit(130)
        raise
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _ask(task: str, folder: Path) -> None:
    with rundir.claimed(folder):
        evaluate(folder, tasks=[task], limit=PROBLEMS, batch_size=100, quiet=True)


@final
class Meter:
    """How far the whole grid is, in FLOPs, since runs of different depth do not take equally long."""

    def __init__(self, plan: Plan, waiting: list[Cell], runs: Path, *, show: bool):
        self.runs, self.show = runs, show
        self.cells = {cell.name: cell for cell in plan.cells}
        self.open = {cell.name for cell in waiting}
        self.cost = {cell.name: plan.flops(cell.variant) for cell in plan.cells}
        self.total = sum(self.cost.values())
        self.start, self.first = time.monotonic(), self._done()
        self.bar: Progress | None = None

    def __enter__(self) -> Meter:
        if self.show and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True, markup=False, highlight=False))
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        elif self.show:
            print(f"{len(self.cells) - len(self.open)} of {len(self.cells)} runs are done", file=sys.stderr)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def finished(self, cell: Cell) -> None:
        self.open.discard(cell.name)
        if not self.show:
            return
        loss = _last_line(self.runs / cell.name, "valid_loss").get("valid_loss", math.nan)
        said = divergence(cell, self.runs) or f"validation loss {loss:.4f}"
        line = f"{cell.variant}, seed {cell.seed}: {said} ({self._so_far()})"
        self.bar.console.print(line) if self.bar else print(line, file=sys.stderr, flush=True)

    def tick(self) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=self._done(), description=self._so_far())

    def _so_far(self) -> str:
        done = self._done()
        share, elapsed = done - self.first, time.monotonic() - self.start
        left = f", {duration(elapsed * (self.total - done) / share)} left" if share > 0 and self.open else ""
        return f"{len(self.cells) - len(self.open)} of {len(self.cells)} runs{left}"

    def _done(self) -> float:
        return sum(cost * (self._trained(name) if name in self.open else 1.0) for name, cost in self.cost.items())

    def _trained(self, name: str) -> float:
        return _last_line(self.runs / name, "loss").get("step", 0) / self.cells[name].config.train.steps


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
