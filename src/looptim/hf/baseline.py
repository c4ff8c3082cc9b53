"""A baseline of the suite as JSON: what belongs to one kind of processor, and when something is worse than it was."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import torch

from ..base.files import write_whole

COLUMNS = ("measure", "median", "quartiles", "better")


@final
@dataclasses.dataclass(frozen=True)
class Measure:
    """A ratio or a count: its median and quartiles over the rounds of one run."""

    name: str
    low: float
    median: float
    high: float
    better: str
    """`lower` or `higher`."""

    @property
    def cells(self) -> list[str]:
        """As the strings of `COLUMNS`."""
        return [self.name, f"{self.median:.3f}", f"{self.low:.3f} to {self.high:.3f}", self.better]


def processor() -> str:
    """What the measures belong to: another kind of processor has other ratios."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    # In a virtual machine the name may hide the generation, which family and model tell.
    kind = [said.get("model name", "unknown"), *(said[key] for key in ("cpu family", "model") if key in said)]
    return " ".join([platform.machine(), *kind, torch.backends.cpu.get_cpu_capability()])


def conditions() -> dict[str, Any]:
    """What the measures of a baseline were taken with."""
    return {"processor": processor(), "torch": torch.__version__, "threads": torch.get_num_threads()}


def as_json(measures: Iterable[Measure]) -> str:
    """A baseline to compare with later."""
    listed = [dataclasses.asdict(measure) for measure in measures]
    return json.dumps({**conditions(), "measures": listed}, indent=2) + "\n"


def read(file: Path) -> tuple[dict[str, Any], dict[str, Measure]]:
    """The conditions and the measures of a baseline."""
    try:
        known = json.loads(file.read_text())
        return known, {each["name"]: Measure(**each) for each in known.pop("measures")}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} is no baseline; make one with looptim bench --suite --update FILE") from None


def update(file: Path, measures: list[Measure]) -> None:
    """Put measures into a baseline; it keeps the others if they were taken under the same conditions."""
    known, before = read(file) if file.exists() else (conditions(), {})
    if known != conditions():
        raise ValueError(
            f"{file} was measured with {known}, and this is {conditions()}; delete it, or choose another file"
        )
    write_whole(file, as_json((before | {measure.name: measure for measure in measures}).values()))


def regressions(measures: list[Measure], baseline: Path) -> list[str] | None:
    """What is worse than the baseline beyond the noise of both, a line each; None on another kind of processor."""
    known, before = read(baseline)
    if known.get("processor") != processor():
        return None
    return [line for now in measures if now.name in before for line in _compare(now, before[now.name])]


def _compare(now: Measure, before: Measure) -> list[str]:
    # Half of all rounds lie between the quartiles, so that three times their distance is beyond nearly all.
    noise = max(3 * (now.high - now.low), 3 * (before.high - before.low), 0.02 * before.median)
    worse = (now.median - before.median) * (1 if now.better == "lower" else -1)
    change = f"{before.median:.3f} -> {now.median:.3f}, noise {noise:.3f}"
    return [f"{now.name}: {change}"] if worse > noise else []
