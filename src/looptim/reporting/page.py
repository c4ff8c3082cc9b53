"""The page of a report or a study: what it shows as plain data, packed into the template that `make page` builds."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from ..base.console import clean
from ..base.files import os_errors_as, write_together
from ..config import Config
from ..loop import PRESETS
from ..model.build import build_loop, seeded
from .style import dash_of
from .tables import Table, page_table
from .template import equation_of, fill, frame

TOKENS = "training tokens"
"""What the horizontal axes of most charts are; these are zoomed together."""
MOST_POINTS = 4000
"""The most points of a line; of a longer one only every second point is shown, or every third."""


@final
@dataclasses.dataclass(frozen=True)
class Group:
    """What a reader switches on and off: a run, or all runs of a variant; its lines look alike in every chart."""

    name: str
    style: Mapping[str, Any]
    bits: float | None = None
    """The factor from nats per token to bits per byte."""

    def as_json(self) -> dict[str, Any]:
        """Its name and look."""
        dash = dash_of(self.style["linestyle"])
        return {"name": clean(self.name), "color": self.style["color"], "dash": dash, "bits": self.bits}


@final
@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a chart; lines of the same group and part are seeds, of which the page draws mean and interval."""

    group: int
    part: str
    x: Iterable[float]
    y: Iterable[float]
    half: Iterable[float | None] | None = None
    """Halves of intervals that are known already."""
    marks: bool = False

    def as_json(self) -> dict[str, Any]:
        """Its points, thinned where they are very many."""
        x, y = numbers(self.x), numbers(self.y)
        every = -(-len(x) // MOST_POINTS) or 1
        found: dict[str, Any] = {"group": self.group, "part": clean(self.part), "x": x[::every], "y": y[::every]}
        if self.half is not None:
            found["half"] = numbers(self.half)[::every]
        return found | ({"marks": True} if self.marks else {})


@final
@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines over training, or over something else."""

    key: str
    title: str
    caption: str
    y: str
    lines: Sequence[Line]
    x: str = TOKENS
    log: bool = False
    noisy: bool = False
    """Whether single points are noisy and the beginning is far from the rest: smoothed, and scaled by the rest."""
    loss: bool = False
    """Whether it is in nats per token, which can be bits per byte."""
    named: bool = False
    """Whether the name of a part says it all, without that of its group."""
    single: bool = False
    """Whether groups would hide each other, so that one is shown at a time."""

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        flat = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return flat | {"lines": [line.as_json() for line in self.lines]}


@final
@dataclasses.dataclass(frozen=True)
class Page:
    """A whole page; in a notebook it shows itself."""

    title: str
    groups: Sequence[Group]
    charts: Sequence[Chart]
    tables: Sequence[Table] = ()
    forests: Sequence[Mapping[str, Any]] = ()
    """Numbers with intervals, as `forest` makes them."""
    heats: Sequence[Mapping[str, Any]] = ()
    """Shares as shaded cells: `title`, `caption`, `columns`, and `rows` of `group`, `values` and `borders`."""
    equations: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    """What was written over training: `group`, `prompt`, and `texts` of `step`, `tokens` and `text`."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    student: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Student's quantile over the root of a number of seeds, by that number."""
    watch: float | None = None
    """Seconds after which the page reads itself again."""

    def html(self) -> str:
        """The page as one file that needs nothing else."""
        data = {
            "title": clean(self.title),
            "watch": self.watch,
            "groups": [group.as_json() for group in self.groups],
            "charts": [chart.as_json() for chart in self.charts],
            "forests": list(self.forests),
            "heats": list(self.heats),
            "equations": list(self.equations),
            "samples": list(self.samples),
            "tables": [page_table(table) for table in self.tables],
            "files": [{"name": clean(name), "text": text} for name, text in self.files.items()],
            "notes": [clean(note) for note in self.notes],
            "student": self.student,
        }
        return fill("report", data)

    def _repr_html_(self) -> str:
        return frame(self.html(), height=800)


def forest(
    title: str,
    caption: str,
    x: str,
    rows: Iterable[tuple[int, float, tuple[float, float] | None, Iterable[float]]],
    *,
    marks: Sequence[float] = (0,),
    signed: bool = True,
) -> dict[str, Any]:
    """Intervals, one under the other: each of a group, with its mean, its ends and the values it is a mean of."""
    found = []
    for group, mean, ends, values in rows:
        low, high = numbers(ends or (None, None))
        found.append({"group": group, "mean": mean, "low": low, "high": high, "values": numbers(values)})
    return {"title": title, "caption": caption, "x": x, "marks": list(marks), "signed": signed, "rows": found}


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Numbers of seven digits for JSON; what is not finite is None.

    >>> numbers([1.23456789, float("nan"), 3e6])
    [1.234568, None, 3000000.0]
    """
    return [None if value is None or not math.isfinite(value) else float(f"{value:.7g}") for value in values]


def equations_of(configs: Iterable[tuple[str, Config]]) -> list[dict[str, Any]]:
    """The distinct equations of models, whatever their number of loops; `of` tells those of one name apart.

    A transition of somebody's own has none here: a page executes no code.
    """
    found: list[dict[str, Any]] = []
    of: list[list[str]] = []
    for name, config in configs:
        for segment in config.model.segments:
            if segment.loops is None or config.model.loop.preset not in PRESETS:
                continue
            loop = seeded(0, "equation", lambda m=config.model, loops=segment.loops: build_loop(m, loops))
            equation = equation_of(loop) | {"steps": 0, "parameters": 0}
            if equation not in found:
                found.append(equation)
                of.append([])
            of[found.index(equation)].append(clean(name))
    several = Counter(equation["name"] for equation in found)
    return [
        {**equation, "of": list(dict.fromkeys(names)) if several[equation["name"]] > 1 else []}
        for equation, names in zip(found, of, strict=True)
    ]


def write_report(out: Path, files: Mapping[str, bytes], *, figures: Sequence[str]) -> None:
    """Write the files of a report, and remove those `figures` of an earlier report that are not among them."""
    with os_errors_as(f"cannot write the report to {out}", "choose another folder"):
        write_together(out, files)
        for name in figures:
            for stale in {f"{name}.png", f"{name}.svg"} - set(files):
                (out / stale).unlink(missing_ok=True)
