"""What a run says while it runs: metrics.jsonl, a progress bar or plain lines, and trackers."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import __version__
from ..base.files import write_whole
from ..config import Config
from .distributed import World
from .sinks import Sink, open_sinks, scalars


@final
class RunLog:
    """Writes a run's metrics as they come; only the first process of many does anything."""

    def __init__(self, folder: Path, config: Config, world: World, *, first_step: int, progress: bool):
        self.path = folder / "metrics.jsonl"
        self.settings = config.train
        self.active = world.first
        self.first_step = first_step
        self.show = progress and world.first
        self.world = world
        self.seconds: deque[float] = deque(maxlen=50)
        self.clock = time.perf_counter()
        self.peak = 0.0
        self.bar: Progress | None = None
        self.sinks: list[Sink] = []
        self.config = config

    def __enter__(self) -> RunLog:
        if not self.active:
            return self
        self.peak = gemm_peak(self.world.device, self.settings.dtype) * self.world.size
        _drop_lines_after(self.path, self.first_step)
        self.file = self.path.open("a")
        # Last of what may fail: a tracker that is open wants to be closed.
        self.sinks = open_sinks(self.settings.track, run_dir=self.path.parent, config=self.config.model_dump())
        if self.show and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.task = self.bar.add_task("training", total=self.settings.steps, completed=self.first_step)
            self.bar.start()
        self.clock = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        if not self.active:
            return
        if self.bar is not None:
            self.bar.stop()
        self.file.close()
        for sink in self.sinks:
            sink.close()

    def update(self, step: int, values: dict[str, Any], tokens_per_step: int, flops_per_token: float) -> None:
        """Log update `step`, of which `values` tell."""
        now = time.perf_counter()
        self.seconds.append(now - self.clock)
        self.clock = now
        done = step + 1
        if not self.active:
            return
        speed = tokens_per_step / statistics.median(self.seconds)
        mfu = speed * flops_per_token / self.peak
        if self.bar is not None:
            text = f"loss {values['loss']:.3f}  {speed:,.0f} tokens/s  MFU {mfu:.0%}"
            self.bar.update(self.task, completed=done, description=text)
        if done % self.settings.log_every and done != self.settings.steps:
            return
        record = {
            "step": done,
            "tokens": done * tokens_per_step,
            **values,
            "tokens_per_s": round(speed, 1),
            "mfu": round(mfu, 4),
        }
        self._write(record)
        if self.show and self.bar is None:
            eta = statistics.median(self.seconds) * (self.settings.steps - done)
            print(
                f"step {done}/{self.settings.steps}  loss {values['loss']:.4f}  {speed:,.0f} tokens/s  MFU {mfu:.0%}  "
                f"{eta:.0f} s left",
                file=sys.stderr,
            )

    def validation(self, done: int, values: dict[str, Any], tokens: int) -> None:
        """Log a validation after `done` updates."""
        if self.active:
            self._write({"step": done, "tokens": tokens, **values})
            if self.show:
                message = f"step {done}  validation loss {values['valid_loss']:.4f}"
                self.bar.console.print(message) if self.bar else print(message, file=sys.stderr)
        # Validation is not part of the time of an update.
        self.clock = time.perf_counter()

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        except OSError as error:
            raise OSError(f"cannot write to {self.path}: {error.strerror}; the last checkpoint is kept") from None
        for sink in self.sinks:
            sink.log(record["step"], scalars(record))


def _drop_lines_after(path: Path, step: int) -> None:
    """Forget what was logged after the checkpoint a run resumes from, and a line a kill left unfinished."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            # From the start again, also the validation before the first update.
            if step and json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    write_whole(path, "".join(kept))


def gemm_peak(device: torch.device, dtype: str) -> float:
    """FLOP/s of a large matmul in the dtype of the run, measured here and now: what MFU is a share of."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def environment(world: World) -> dict[str, Any]:
    """What a result may depend on besides the config."""
    return {
        "looptim": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processes": world.size,
        "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def _commit() -> str | None:
    """The commit of the source this runs from, if it runs from a checkout and there is a git to ask."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError:
        return None
    # An installed looptim may lie inside another project's repository.
    return lines[1] if len(lines) == 2 and Path(lines[0]) / "src" / "looptim" == here else None
