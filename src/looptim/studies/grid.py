"""Running a grid: worker processes train what is unfinished, and the parent shows overall progress."""

from __future__ import annotations

import _thread
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import final

import torch

from ..base.console import Progress
from ..base.files import HeldError, write_whole
from ..config import Config
from ..data import GRADED
from ..evaluation import evaluate
from ..evaluation.exits import FAIR, evaluate_exits
from ..evaluation.graded import evaluate_hops
from ..evaluation.tasks import COUNT as PROBLEMS
from ..rundir import RunDir, read_record
from ..trainer import train
from ..training.checkpoint import prune
from ..training.step import DivergedError
from .carry import pack, unpack, without_main
from .spec import Cell, Plan

EXIT_WINDOWS = 128
"""Held-out windows, half of them to choose thresholds by."""


def task_of(config: Config) -> str | None:
    """The synthetic task a run learns, which is then also scored by generation."""
    kind, _, name = config.data.source.partition(":")
    return name if kind == "synthetic" else None


def is_finished(cell: Cell, runs: Path) -> bool:
    """Whether a run has its last checkpoint and what is asked of it: exact match for a task, exits for their study.

    A run restored from an archive has no checkpoints; its last validation counts.
    """
    run = RunDir(runs / cell.name)
    last = run.latest()
    record = run.metrics.last("valid_loss") if last is None else read_record(last)
    asked = answers_of(cell, runs), exits_of(cell, runs)
    return record.get("step") == cell.config.train.steps and all(file is None or file.is_file() for file in asked)


def divergence(cell: Cell, runs: Path) -> str | None:
    """Why a run failed for good; it would fail every time, so it is not tried again."""
    file = RunDir(runs / cell.name).diverged_file
    return file.read_text() if file.is_file() else None


def is_settled(cell: Cell, runs: Path) -> bool:
    """Whether nothing is left to do for a run."""
    return is_finished(cell, runs) or divergence(cell, runs) is not None


def answers_of(cell: Cell, runs: Path) -> Path | None:
    """The file with a run's exact match, if it learns a task."""
    task, run = task_of(cell.config), RunDir(runs / cell.name)
    if task in GRADED:
        return run.hops_file
    return run.evaluation(task, limit=PROBLEMS).result if task else None


def exits_of(cell: Cell, runs: Path) -> Path | None:
    """The file of a run that has its exits, where its study asks for them."""
    return RunDir(runs / cell.name).exits.result if cell.exits else None


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Schedulers stop a job with SIGTERM, which would kill the study and leave its runs without checkpoints."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_grid(plan: Plan, runs: Path, *, jobs: int, progress: bool, tick: Callable[[], None] = lambda: None) -> None:
    """Train every run that is not settled, `jobs` at a time; `tick` is called about once a second."""
    cells = {cell.name: cell for cell in plan.cells}.values()
    waiting = [cell for cell in cells if not is_settled(cell, runs)]
    for cell in cells:
        if cell not in waiting:
            _tidy(RunDir(runs / cell.name), cell.config)
    if not waiting:
        return
    threads = max(1, torch.get_num_threads() // jobs)
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    meter = Meter(plan, waiting, runs, show=progress)
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_start_worker, initargs=(os.getpid(), threads, stop))
    presets = pack(cell.config.model.loop.preset for cell in waiting)
    try:
        with meter.progress:
            _follow(waiting, without_main(lambda cell: pool.submit(_run, cell, runs, presets)), meter, tick)
    except BrokenProcessPool:
        raise ValueError(
            "a worker was killed, perhaps for lack of memory; the same command continues, and fewer --jobs need less"
        ) from None
    except BaseException:
        # After Ctrl-C or a failed run, the runs training beside it still write a checkpoint.
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _tidy(run: RunDir, config: Config) -> None:
    """Delete what a kill after the last checkpoint left in a finished run, unless another process works on it."""
    if run.latest() is not None:
        with suppress(HeldError), run.claim():
            prune(run, keep_last=config.train.keep_last, keep_every=config.train.keep_every)


def _follow(
    waiting: list[Cell], submit: Callable[[Cell], Future[None]], meter: Meter, tick: Callable[[], None]
) -> None:
    futures = {submit(cell): cell for cell in waiting}
    while futures:
        done, _ = wait(futures, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            cell = futures.pop(future)
            try:
                future.result()
            except HeldError:
                # Another study is training this shared run, and its result counts for us too, so we do other runs
                # first.
                futures[submit(cell)] = cell
                continue
            meter.finished(cell)
        meter.tick()
        tick()


_stop: Event
"""An event in each worker that is set when its study stops."""


def _start_worker(parent: int, threads: int, stop: Event) -> None:
    global _stop
    _stop = stop
    torch.set_num_threads(threads)
    # Ctrl-C is for the study, which passes it on; a run told twice would stop without a checkpoint.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    # Between runs there is nothing to stop, and a worker that exits breaks the pool for the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        asked = False
        # A worker whose study was killed would keep holding its run. Checkpoints are written whole, so it may just
        # exit.
        while os.getppid() == parent:
            if stop.is_set() and not asked:
                asked = True
                _thread.interrupt_main()
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def train_cell(cell: Cell, runs: Path) -> None:
    """Train a run as far as it is unfinished, and score its task. A run that diverges records that in a file."""
    run = RunDir(runs / cell.name)
    try:
        train(cell.config, run.path, resume=True, progress=False)
        task = task_of(cell.config)
        if task is not None:
            _ask(task, run)
        if cell.exits:
            with run.claim():
                evaluate_exits(run.path, windows=EXIT_WINDOWS, speed=False, only=FAIR, quiet=True)
    except DivergedError as error:
        write_whole(run.diverged_file, str(error))


def _run(cell: Cell, runs: Path, presets: bytes) -> None:
    """Train a run, and score its task. A HeldError if another study is training it."""
    unpack(presets)
    if is_settled(cell, runs):
        # Another study that shares the run may have finished it since this one looked.
        return
    run = RunDir(runs / cell.name)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if _stop.is_set():
            raise KeyboardInterrupt
        # The lock is taken before the data is opened, since a held run is asked for again and again.
        with run.claim():
            pass
        train_cell(cell, runs)
    except HeldError:
        # If all remaining runs are held, a study should not spend its time on asking.
        time.sleep(2)
        raise
    except KeyboardInterrupt:
        if not _stop.is_set():
            # A broken pool would wait for its workers, though their work is no longer needed.
            os._exit(130)
        raise
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _ask(task: str, run: RunDir) -> None:
    with run.claim():
        if task in GRADED:
            evaluate_hops(run.path, problems=PROBLEMS)
            return
        evaluate(run.path, tasks=[task], limit=PROBLEMS, batch_size=100, quiet=True)


@final
class Meter:
    """Progress of the whole grid in FLOPs, since runs of different depths do not take equally long."""

    def __init__(self, plan: Plan, waiting: list[Cell], runs: Path, *, show: bool):
        self.runs = runs
        self.cells = {cell.name: cell for cell in plan.cells}
        self.open = {cell.name for cell in waiting}
        self.cost = {cell.name: plan.flops(cell.variant) for cell in plan.cells}
        self.progress = Progress(self._so_far(), sum(self.cost.values()), done=self._done(), show=show)

    def finished(self, cell: Cell) -> None:
        self.open.discard(cell.name)
        self.progress.title = self._so_far()
        loss = RunDir(self.runs / cell.name).metrics.last("valid_loss").get("valid_loss", math.nan)
        said = divergence(cell, self.runs) or f"validation loss {loss:.4f}"
        self.progress.say(f"{cell.variant}, seed {cell.seed}: {said} ({self._so_far()})")

    def tick(self) -> None:
        self.progress.advance(self._done() - self.progress.done)

    def _so_far(self) -> str:
        return f"{len(self.cells) - len(self.open)} of {len(self.cells)} runs are done"

    def _done(self) -> float:
        return sum(cost * (self._trained(name) if name in self.open else 1.0) for name, cost in self.cost.items())

    def _trained(self, name: str) -> float:
        return RunDir(self.runs / name).metrics.last("loss").get("step", 0) / self.cells[name].config.train.steps
