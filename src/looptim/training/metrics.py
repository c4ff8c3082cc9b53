"""What a run reports while it runs: metrics, progress, trackers, and the environment."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any, final

import torch

from .. import __version__
from ..base.console import Progress
from ..config import Config
from ..rundir import RunDir
from .distributed import World
from .peak import gemm_peak
from .sinks import Sink, open_sinks, scalars


@final
class RunLog:
    """Writes a run's metrics as they come; on all processes but the first, it does nothing."""

    def __init__(self, run: RunDir, config: Config, world: World, *, first_step: int, progress: bool):
        self.run, self.config, self.world, self.first_step = run, config, world, first_step
        self.progress = Progress("training", config.train.steps, done=first_step, show=progress and world.first)
        self.seconds: deque[float] = deque(maxlen=50)
        self.clock, self.unread = time.perf_counter(), 0
        self.peak, self.text = 0.0, ""
        self.sinks: list[Sink] = []

    def __enter__(self) -> RunLog:
        if self.world.first:
            self.peak = gemm_peak(self.world.device, self.config.train.dtype) * self.world.size
            self.run.metrics.keep(until=self.first_step)
            if self.run.samples.path.is_file():
                self.run.samples.keep(until=self.first_step)
            # Trackers are opened after everything else that may fail, since an open tracker must be closed.
            self.sinks = open_sinks(self.config.train.track, self.run, config=self.config.model_dump())
            self.progress.__enter__()
        self.clock = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.__exit__(*error)
        for sink in self.sinks:
            sink.close()

    def is_logged(self, step: int) -> bool:
        """Whether to read the numbers of this update, which waits for the device."""
        return (step + 1) % self.config.train.log_every == 0 or step + 1 == self.config.train.steps

    def unlogged(self) -> None:
        """Count an update whose numbers, even its duration, are not known yet."""
        self.unread += 1
        self.progress.advance(1, self.text)

    def update(
        self, step: int, values: dict[str, Any], *, tokens: int, tokens_per_step: int, flops_per_token: float
    ) -> None:
        """Log update `step` with its `values`; `tokens` is the number trained on so far."""
        now = time.perf_counter()
        self.seconds.append((now - self.clock) / (self.unread + 1))
        self.clock, self.unread = now, 0
        done, steps = step + 1, self.config.train.steps
        if not self.world.first:
            return
        seconds = statistics.median(self.seconds)
        speed = tokens_per_step / seconds
        mfu = speed * flops_per_token / self.peak
        self.text = f"step {done}/{steps}, loss {values['loss']:.4f}, {speed:,.0f} tokens/s, MFU {mfu:.0%}"
        self.progress.advance(1, self.text, left=seconds * (steps - done), now=True)
        if "skipped" in values:
            self.progress.say(f"step {done}: {values['skipped']} updates were not finite and were skipped")
        speeds = {"tokens_per_s": round(speed, 1), "mfu": round(mfu, 4)}
        numbers = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._write({"step": done, "tokens": tokens, **numbers, **speeds})

    def validation(self, done: int, values: dict[str, Any], tokens: int, *, sample: str | None) -> None:
        """Log a validation after `done` updates, and what the model wrote then, if anything."""
        if self.world.first:
            self._write({"step": done, "tokens": tokens, **values})
            if sample is not None:
                prompt = self.config.train.sample
                self.run.samples.append({"step": done, "tokens": tokens, "prompt": prompt, "text": sample})
            self.progress.say(f"step {done}, validation loss {values['valid_loss']:.4f}")
        # Validation is not part of an update's time.
        self.clock, self.unread = time.perf_counter(), 0

    def _write(self, record: dict[str, Any]) -> None:
        self.run.metrics.append(record)
        for sink in self.sinks:
            sink.log(record["step"], scalars(record))


def environment(world: World) -> dict[str, Any]:
    """What else a result may depend on, besides the config."""
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
    """The commit of the source if it runs from a checkout and git is available."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError:
        return None
    # An installed looptim may lie inside another project's repository.
    return lines[1] if len(lines) == 2 and Path(lines[0]) / "src" / "looptim" == here else None
