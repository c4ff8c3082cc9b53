"""Figures of one or several runs, drawn and rendered."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ..base.console import clean
from ..rundir import Run
from .style import LINESTYLES, MUTED, PALE, RC, STEPS, styles_of

SVG_LIMIT = 200_000
"""Bytes beyond which a figure is written as PNG only."""


class Quantity(NamedTuple):
    """What a figure shows, in words."""

    key: str
    title: str
    ylabel: str
    caption: str


OVERLAID = (
    Quantity("lr", "Learning rate", "learning rate", "The learning rate of each step."),
    Quantity("grad_norm", "Gradient norm", "global L2 norm", "Over all parameters; pale lines are single steps."),
)
PER_LOOP = (
    Quantity("step_size", "Step size per loop", "step size η", "How far each loop moves the state."),
    Quantity("decay", "Decay per loop", "decay λ", "How much of the state each loop forgets, per unit of step size."),
    Quantity("state_norm", "State norm per loop", "RMS of the state Y", "At the start and after each loop."),
    Quantity("objective", "Local objective per loop", "objective f", "What each loop takes a step on."),
)
FIGURES = ("loss", "loss_end", "moe_load", *(quantity.key for quantity in OVERLAID + PER_LOOP))


class Picture(NamedTuple):
    """A figure with its file's name and the sentence below it."""

    name: str
    caption: str
    figure: Figure


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean over a centered window of a twenty-fifth of the points, which shifts nothing; NaN is left out."""
    if not len(values):
        return values
    kernel = np.hanning(2 * (len(values) // 50) + 3)[1:-1]
    finite = np.isfinite(values)
    # A whole window of NaN stays NaN.
    with np.errstate(invalid="ignore"):
        return np.convolve(np.where(finite, values, 0), kernel, "same") / np.convolve(finite, kernel, "same")


def axes_of(
    title: str, ylabel: str, panels: Sequence[str] = ("",), *, xlabel: str | None = None, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure that is readable on a phone: panels below each other, side by side only when they are many.

    Over training tokens unless `xlabel` says over what.
    """
    columns = 1 if len(panels) <= 3 else 2 if len(panels) <= 8 else 3
    rows = -(-len(panels) // columns)
    figure = Figure(
        figsize=(5.6, 3.4 if rows == 1 else 0.8 + 1.7 * rows), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    grid = list(figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).flat)
    for index, axes in enumerate(grid):
        axes.set_visible(index < len(panels))
        if xlabel is None:
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _count(value)))
        axes.xaxis.set_major_locator(MaxNLocator(7 // columns + 1, steps=STEPS, integer=xlabel is not None))
        # A number of ticks that depends on the axes' size would widen labels after the layout is settled.
        axes.yaxis.set_major_locator(MaxNLocator(6 if rows == 1 else 4, steps=STEPS))
        axes.set_ylabel(ylabel if index % columns == 0 else "")
        if index + columns >= len(panels):
            axes.set_xlabel(xlabel or "training tokens")
            axes.tick_params(labelbottom=True)
    for axes, name in zip(grid, panels, strict=False):
        axes.set_title(literal(name))
    return figure, grid[: len(panels)]


def literal(name: str) -> str:
    """A name as it is: in matplotlib dollars begin a formula, and what begins with an underscore has no legend."""
    name = clean(name).replace("$", "\\$")
    return f" {name}" if name.startswith("_") else name


def log_scale(axes: Axes, values: np.ndarray) -> None:
    """A logarithmic axis that says 0.5 and 20, not 5 × 10⁻¹ and 2 × 10¹."""
    axes.set_yscale("log")
    narrow = np.ptp(np.log10(values)) < 2
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Below the axes, where it hides nothing; the figure grows by its rows."""
    for handle in handles:
        handle.set_label(literal(str(handle.get_label())))
    columns = int(min(len(handles), max(1, 400 // (42 + 5 * max(len(str(handle.get_label())) for handle in handles)))))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(handles) // columns))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9)


def _count(value: float) -> str:
    """A count with its unit.

    >>> _count(1_500_000)
    '1.5M'
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _loss(runs: Sequence[Run], name: str, *, since: float) -> Picture | None:
    """Loss of all runs from the fraction `since` of the training on, where the end has room of its own."""
    figure, (axes,) = axes_of("Loss, the last half" if since else "Loss", "loss (nats per token)")
    start = since * max(run.lines[-1]["tokens"] for run in runs)
    marks: dict[str, Any] = {"markerfacecolor": "white", "markersize": 4.5, "linestyle": "none", "zorder": 3}
    shown = 0
    for run, style in zip(runs, _styles(runs), strict=True):
        tokens, loss = run.column("loss")
        keep = tokens >= start
        if not since and len(runs) <= 4:
            axes.plot(tokens, loss, color=style["color"], **PALE)
        axes.plot(tokens[keep], smooth(loss)[keep], color=style["color"], linestyle=style["linestyle"])
        valid_tokens, valid = run.column("valid_loss")
        late = np.flatnonzero(valid_tokens >= start)[:: -(-len(valid) // 25) or 1]
        axes.plot(valid_tokens[late], valid[late], **marks, color=style["color"], marker=style["marker"])
        shown += int(np.isfinite(loss[keep]).sum() + np.isfinite(valid[late]).sum())
    if shown < (4 if since else 1):
        return None
    handles = _handles(runs)
    if len(runs) == 1:
        handles[0].set_label("training")
    if any("valid_loss" in line for run in runs for line in run.lines):
        color = handles[0].get_color() if len(runs) == 1 else MUTED
        handles.append(Line2D([], [], label="validation", color=color, marker="o", **marks))
    legend(figure, handles)
    pale = "" if since or len(runs) > 4 else ", pale lines single ones"
    return Picture(name, f"Lines are means over neighboring logged steps{pale}; open markers are validation.", figure)


def _styles(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return styles_of([run.preset for run in runs])


def _handles(runs: Sequence[Run]) -> list[Line2D]:
    """Entries of a legend, one for each run."""
    return [
        Line2D([], [], label=run.name, color=style["color"], linestyle=style["linestyle"])
        for run, style in zip(runs, _styles(runs), strict=True)
    ]


def _overlay(runs: Sequence[Run], quantity: Quantity) -> Picture | None:
    """One number over training, every run in the same axes; norms on a logarithmic one, where spikes have room."""
    columns = [run.column(quantity.key) for run in runs]
    known = np.concatenate([values[np.isfinite(values) & (values > 0)] for _, values in columns])
    if not len(known):
        return None
    figure, (axes,) = axes_of(quantity.title, quantity.ylabel)
    for index, ((tokens, values), style) in enumerate(zip(columns, _styles(runs), strict=True)):
        if quantity.key == "grad_norm":
            axes.plot(tokens, values, color=style["color"], **PALE)
            # The mean is geometric, so that one spike does not lift it.
            with np.errstate(divide="ignore"):
                axes.plot(tokens, np.exp(smooth(np.log(values))), color=style["color"], linestyle=style["linestyle"])
        else:
            # Runs often share a schedule: the first lie wider under the later ones, so that all are seen.
            width = 1.6 + 1.2 * min(len(runs) - 1 - index, 5)
            axes.plot(tokens, values, color=style["color"], linewidth=width)
            axes.ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
    if quantity.key == "grad_norm":
        log_scale(axes, known)
    if len(runs) > 1:
        legend(figure, _handles(runs))
    return Picture(quantity.key, quantity.caption, figure)


def _per_loop(runs: Sequence[Run], quantity: Quantity) -> Picture | None:
    """A list over training, a line per loop and a panel per run."""
    tables = {run.name: run.columns(quantity.key) for run in runs}
    tables = {name: (tokens, table) for name, (tokens, table) in tables.items() if np.isfinite(table).any()}
    if not tables:
        return None
    figure, panels = axes_of(quantity.title, quantity.ylabel, list(tables) if len(runs) > 1 else [""])
    widest = max((run for run in runs if run.name in tables), key=lambda run: tables[run.name][1].shape[1])
    labels = loop_labels(widest.loops, tables[widest.name][1].shape[1], from_start=quantity.key == "state_norm")
    colors = _ordered(len(labels))
    for axes, (tokens, table) in zip(panels, tables.values(), strict=True):
        for color, values in zip(colors, table.T, strict=False):
            axes.plot(tokens, values, color=color, marker="o" if len(tokens) <= 30 else "", markersize=3)
    values = np.concatenate([table[np.isfinite(table)] for _, table in tables.values()])
    if values.min() > 0 and values.max() > 20 * values.min():
        log_scale(panels[0], values)
    legend(figure, _thinned([Line2D([], [], color=c, label=text) for c, text in zip(colors, labels, strict=True)]))
    return Picture(quantity.key, quantity.caption, figure)


def loop_labels(loops: Sequence[int], columns: int, *, from_start: bool) -> list[str]:
    """What the columns of a list over loops are. The state is seen once more than it is stepped: before the first."""
    first = 0 if from_start else 1
    names = [[f"loop {i}" if i else "start" for i in range(first, times + 1)] for times in loops]
    if len(names) > 1 and sum(map(len, names)) == columns:
        return [f"segment {index}, {name}" for index, segment in enumerate(names, 1) for name in segment]
    return [f"loop {first + i}" if first + i else "start" for i in range(columns)]


def _moe(runs: Sequence[Run]) -> Picture | None:
    """Load balance over training: color is the layer, dash the visit, a panel per run."""
    routed = [run for run in runs if any(line.get("moe_load") for line in run.lines)]
    layers = list(dict.fromkeys(layer for run in routed for line in run.lines for layer in line.get("moe_load", ())))
    if not layers:
        return None
    tables = [{layer: run.columns("moe_load", layer) for layer in layers} for run in routed]
    visits = max(table.shape[1] for run in tables for _, table in run.values())
    # More lines than this are a carpet: then a layer is drawn once, by its worst visit.
    each = visits > 1 and visits * len(layers) <= 24
    names = [run.name for run in routed] if len(runs) > 1 else [""]
    figure, panels = axes_of("Expert load", "largest / mean load", names)
    colors = dict(zip(layers, _ordered(len(layers)), strict=True))
    for axes, run in zip(panels, tables, strict=True):
        axes.axhline(1, color=MUTED, linewidth=0.8)
        for layer, (tokens, table) in run.items():
            lines = table.T if each else [np.fmax.reduce(table, axis=1)] if table.size else []
            for values, dash in zip(lines, itertools.cycle(LINESTYLES), strict=False):
                axes.plot(tokens, smooth(values), color=colors[layer], linestyle=dash, linewidth=1.3)
    handles = _thinned([Line2D([], [], color=colors[layer], label=layer_name(layer)) for layer in layers])
    for visit in range(visits if each else 0):
        dash = LINESTYLES[visit % len(LINESTYLES)]
        handles.append(Line2D([], [], color=MUTED, linestyle=dash, linewidth=1.3, label=f"visit {visit + 1}"))
    legend(figure, handles)
    which = "each visit of a layer" if each or visits == 1 else "the worst visit of a layer"
    return Picture("moe_load", f"Busiest expert over the mean expert, {which}; 1 is perfectly even.", figure)


def _ordered(count: int) -> list[Any]:
    """Colors of an order, dark to light, without the yellow that white swallows."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.85, count)))


def _thinned(handles: list[Line2D], most: int = 9) -> list[Line2D]:
    """A legend of an order needs its ends and some between."""
    kept = handles[:: -(-len(handles) // most)]
    return kept if kept[-1] is handles[-1] else [*kept, handles[-1]]


def layer_name(name: str) -> str:
    """
    >>> layer_name("blocks.3.feedforward")
    'block 3'
    """
    match = re.search(r"\d+", name)
    return f"block {match[0]}" if match else name


def draw(runs: Sequence[Run]) -> list[Picture]:
    """Every figure for which the runs have numbers."""
    drawn = [
        _loss(runs, "loss", since=0),
        _loss(runs, "loss_end", since=0.5),
        *(_overlay(runs, quantity) for quantity in OVERLAID),
        _moe(runs),
        *(_per_loop(runs, quantity) for quantity in PER_LOOP),
    ]
    return [picture for picture in drawn if picture is not None]


def render(make: Callable[[], list[Picture]]) -> tuple[list[Picture], dict[str, bytes]]:
    """The figures that `make` draws, all in one style, and the bytes of their files by name."""
    with matplotlib.rc_context(RC):
        pictures = make()
        return pictures, {name: data for picture in pictures for name, data in _files(picture).items()}


def _files(picture: Picture) -> dict[str, bytes]:
    png, svg = io.BytesIO(), io.BytesIO()
    picture.figure.savefig(png, format="png", dpi=150)
    # The layout is settled by now, and settling it again would cost as much as the drawing.
    picture.figure.set_layout_engine("none")
    picture.figure.savefig(svg, format="svg", metadata={"Date": None})
    files = {f"{picture.name}.png": png.getvalue()}
    return files | ({f"{picture.name}.svg": svg.getvalue()} if len(svg.getvalue()) <= SVG_LIMIT else {})
