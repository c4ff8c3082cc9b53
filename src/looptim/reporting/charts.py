"""What the page of a report shows of runs: charts of what they logged, their numbers, and how their configs differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config
from ..rundir import Run, RunDir
from .page import Chart, Group, Line, Page, equations_of
from .plots import OVERLAID, PER_LOOP, Quantity, layer_name, loop_labels
from .style import styles_of
from .tables import ABSENT, Table


def run_page(
    folders: Sequence[Path], runs: Sequence[Run], tables: Sequence[Table], *, watch: float | None = None
) -> Page:
    """The page of runs, with what else there is to say of them."""
    styles = styles_of([run.preset for run in runs])
    numbers = [_summary(runs)] + ([_differences(runs)] if len(runs) > 1 else [])
    return Page(
        title=", ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs",
        groups=[Group(run.name, style, run.bits_per_byte) for run, style in zip(runs, styles, strict=True)],
        charts=charts(runs),
        tables=[*numbers, *tables],
        equations=equations_of(_configs(folders, runs)),
        samples=[each for group, run in enumerate(runs) for each in samples_of(group, run)],
        files={f"{run.name}/{name}": text for run in runs for name, text in run.files.items()},
        watch=watch,
    )


def _configs(folders: Iterable[Path], runs: Iterable[Run]) -> Iterable[tuple[str, Config]]:
    """The recipes of runs; one that does not load has no equation, and its numbers are shown all the same."""
    for folder, run in zip(folders, runs, strict=True):
        try:
            yield run.name, RunDir(folder).config()
        except ValueError:
            continue


def samples_of(group: int, run: Run) -> list[dict[str, Any]]:
    """What a run wrote over training, by prompt."""
    prompts = dict.fromkeys(line["prompt"] for line in run.samples)
    keys = ("step", "tokens", "text")
    return [
        {
            "group": group,
            "prompt": prompt,
            "texts": [{key: line[key] for key in keys} for line in run.samples if line["prompt"] == prompt],
        }
        for prompt in prompts
    ]


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Every chart for which the runs have numbers; the first is the loss."""
    drawn = [_loss(runs), *(_overlay(runs, each) for each in OVERLAID), *(_per_loop(runs, each) for each in PER_LOOP)]
    return [chart for chart in [*drawn, _load(runs)] if chart.lines]


def _loss(runs: Sequence[Run]) -> Chart:
    lines = []
    for group, run in enumerate(runs):
        parts = {"training": run.column("loss"), "validation": run.column("valid_loss")}
        lines += [Line(group, part, *both, marks=part == "validation") for part, both in parts.items() if len(both[0])]
    caption = (
        "Lines are means over neighboring logged steps, pale lines single ones; open marks are validation. Drag to "
        "zoom, double-click or Escape for all; the scale is set by what follows the first tenth."
    )
    return Chart("loss", "Loss", caption, "nats per token", lines, noisy=True, loss=True)


def _overlay(runs: Sequence[Run], quantity: Quantity) -> Chart:
    columns = [run.column(quantity.key) for run in runs]
    lines = [Line(group, "", *both) for group, both in enumerate(columns) if np.isfinite(both[1]).any()]
    norm = quantity.key == "grad_norm"
    return Chart(quantity.key, quantity.title, quantity.caption, quantity.ylabel, lines, log=norm, noisy=norm)


def _per_loop(runs: Sequence[Run], quantity: Quantity) -> Chart:
    """A line for each loop; of one run at a time, since those of several would not be told apart."""
    lines, seen = [], []
    for group, run in enumerate(runs):
        tokens, table = run.columns(quantity.key)
        labels = loop_labels(run.loops, table.shape[1], from_start=quantity.key == "state_norm")
        lines += [Line(group, label, tokens, values) for label, values in zip(labels, table.T, strict=True)]
        seen.append(table[np.isfinite(table)])
    known = np.concatenate(seen)
    log = bool(len(known)) and known.min() > 0 and known.max() > 20 * known.min()
    return Chart(quantity.key, quantity.title, quantity.caption, quantity.ylabel, lines, log=bool(log), single=True)


def _load(runs: Sequence[Run]) -> Chart:
    lines = []
    for group, run in enumerate(runs):
        layers = dict.fromkeys(layer for line in run.lines for layer in line.get("moe_load") or ())
        for layer in layers:
            tokens, table = run.columns("moe_load", layer)
            lines.append(Line(group, layer_name(layer), tokens, np.fmax.reduce(table, axis=1, initial=-math.inf)))
    caption = "Busiest expert over the mean expert, the worst visit of a layer; 1 is perfectly even."
    return Chart("moe_load", "Expert load", caption, "largest / mean load", lines, noisy=True, single=True)


SUMMARY: dict[str, Callable[[Run], str]] = {
    "transition": lambda run: run.preset,
    "steps": lambda run: f"{run.lines[-1]['step']:,}",
    "tokens": lambda run: f"{run.lines[-1]['tokens']:,}",
    "final training loss": lambda run: _number(_end(run.column("loss")[1]), ".4f", np.mean),
    "final validation loss": lambda run: _number(run.column("valid_loss")[1][-1:], ".4f"),
    "bits per byte": lambda run: _number(run.column("valid_loss")[1][-1:] * (run.bits_per_byte or math.nan), ".4f"),
    "best validation loss": lambda run: _number(run.column("valid_loss")[1], ".4f", np.nanmin),
    "tokens/s, median": lambda run: _number(run.column("tokens_per_s")[1], ",.0f", np.nanmedian),
    "MFU, median": lambda run: _number(run.column("mfu")[1], ".1%", np.nanmedian),
    "training time": lambda run: _duration(run),
}


def _end(values: np.ndarray) -> np.ndarray:
    """The last twenty-fifth, since one batch says little; the last alone if the run ended in NaN."""
    return values[-max(1, len(values) // 25) :] if np.isfinite(values[-1:]).all() else values[-1:]


def _number(values: np.ndarray, form: str, reduce: Callable[[np.ndarray], Any] = np.max) -> str:
    if not len(values):
        return ABSENT
    return format(float(reduce(values)) if np.isfinite(values).any() else math.nan, form)


def _duration(run: Run) -> str:
    """Tokens between logged steps over the speed between them; validation and pauses are not in it."""
    tokens, speed = run.column("tokens_per_s")
    known = speed > 0
    if not known.any():
        return ABSENT
    seconds = round(float((np.diff(tokens, prepend=0)[known] / speed[known]).sum()))
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds % 60:02} s"


def _summary(runs: Sequence[Run]) -> Table:
    """Quantities down and runs across, so that one run fits a phone and many scroll."""
    rows: list[list[Any]] = [[head, *(cell(run) for run in runs)] for head, cell in SUMMARY.items()]
    notes = [
        "Losses in nats per token; the training loss is a mean over the last 4% of the logged steps.",
        "Training time is tokens over tokens/s, without pauses.",
    ]
    return Table("summary", "In numbers", ["", *(run.name for run in runs)], rows, notes)


def _differences(runs: Sequence[Run]) -> Table:
    """The keys on which the configs of the runs differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    cells = {key: [str(run.config.get(key, ABSENT)) for run in runs] for key in keys}
    rows: list[list[Any]] = [[key, *values] for key, values in cells.items() if len(set(values)) > 1]
    header, notes = ["", *(run.name for run in runs)], [] if rows else ["Nothing."]
    return Table("configs", "What differs in the configs", header, rows, notes)
