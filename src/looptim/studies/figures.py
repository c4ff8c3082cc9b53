"""The figures of a study: means over seeds as lines, 95% intervals as bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..reporting.plots import Picture, axes_of, legend, literal, log_scale, smooth
from ..reporting.style import styles_of
from ..rundir import Run
from .measures import MEASURES, Comparison, Outcome, growth
from .spec import Plan
from .statistics import Estimate, estimate

FIGURES = ("loss", "difference", "loops", "state_norm", "grad_norm", "hops", "exits", "phi")

DIFFERENCE = (
    "Bars are 95% intervals that hold for all variants of a panel at once, with the residual of all of them; small "
    "dots are single seeds, paired. Left of the line is better for losses."
)
SCALE = "The scale is set by what follows the first tenth of training."


Curve = tuple[np.ndarray, np.ndarray]
"""Tokens and values."""
Styles = Mapping[str, dict[str, Any]]


def draw(plan: Plan, found: Sequence[Outcome], compared: Sequence[Comparison]) -> list[Picture]:
    """Every figure that has numbers."""
    done = [outcome for outcome in found if outcome.runs]
    reference = next((outcome for outcome in done if outcome.variant == plan.study.reference), None)
    if not done:
        return []
    # Looks are assigned to all variants at once, so they stay the same as runs finish.
    variants = plan.study.variants
    styles = dict(zip(variants, styles_of([variant.preset for variant in variants.values()]), strict=True))
    drawn = [
        _loss(done, reference, styles),
        _difference(compared, plan.study.reference, styles),
        _loops(plan, done),
        _state_norm(done, styles),
        _grad_norm(done, styles),
    ]
    return [picture for picture in drawn if picture is not None]


def _first(outcome: Outcome) -> Run:
    return next(iter(outcome.runs.values()))


def _loss(done: Sequence[Outcome], reference: Outcome | None, styles: Styles) -> Picture:
    """Figure 2 of the paper: the loss, and the loss minus that of the reference."""
    panels = ["training loss"] + ([f"minus {reference.variant}, paired by seed"] if reference else [])
    figure, grid = axes_of("Loss over training", "nats per token", panels, sharey=False)
    curves = {o.variant: [_curve(run, "loss") for run in o.runs.values()] for o in done}
    _lines(grid[0], curves, styles)
    if reference:
        _lines(grid[1], {o.variant: _minus(o.runs, reference.runs) for o in done}, styles)
    legend(figure, [_handle(outcome.variant, styles) for outcome in done])
    caption = "Lines are means over seeds, smoothed; bands are 95% intervals of the smoothed, each for itself. " + SCALE
    return Picture("loss", caption, figure)


def _curve(run: Run, key: str) -> Curve:
    tokens, values = run.column(key)
    return tokens, smooth(values)


def _minus(ours: Mapping[int, Run], theirs: Mapping[int, Run]) -> list[Curve]:
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    return [(tokens, smooth(values)) for tokens, values in (loss_minus(a, b) for a, b in pairs)]


def loss_minus(ours: Run, theirs: Run) -> Curve:
    """The training loss of one run minus another's, after the tokens at which both have logged it."""
    (tokens, loss), (others, other) = ours.column("loss"), theirs.column("loss")
    shared, here, there = np.intersect1d(tokens, others, return_indices=True)
    return shared, loss[here] - other[there]


def _lines(axes: Axes, curves: Mapping[str, Sequence[Curve]], styles: Styles) -> None:
    for variant, some in curves.items():
        _band(axes, some, styles[variant])
    _trim(axes, [curve for some in curves.values() for curve in some])


def _band(axes: Axes, curves: Sequence[Curve], style: Mapping[str, Any]) -> None:
    if not curves:
        return
    tokens = curves[0][0]
    points = [estimate(values.tolist()) for values in np.stack([curve for _, curve in curves]).T]
    mean = np.array([point.mean for point in points if point])
    axes.plot(tokens, mean, **_line(style))
    if len(curves) > 1:
        half = np.array([point.half for point in points if point])
        axes.fill_between(tokens, mean - half, mean + half, color=style["color"], alpha=0.15, linewidth=0)


def _trim(axes: Axes, curves: Sequence[Curve]) -> None:
    """Scale the axis for all but the first tenth of training, whose fall would flatten the rest."""
    kept = [values[len(values) // 10 :] for _, values in curves]
    low, high = min(float(v.min()) for v in kept), max(float(v.max()) for v in kept)
    room = 0.08 * (high - low) or 1.0
    axes.set_ylim(low - room, high + room)


def _difference(compared: Sequence[Comparison], reference: str, styles: Styles) -> Picture | None:
    """Every variant minus the reference in every measure, with interval and single seeds."""
    drawn = [(each, {name: v for name, v in each.to_reference.items() if v is not None}) for each in compared]
    drawn = [(each, values) for each, values in drawn if values]
    if not drawn:
        return None
    heights = [1.2 + 0.32 * len(values) for _, values in drawn]
    figure = Figure(figsize=(5.6, sum(heights)), layout="constrained")
    figure.suptitle(f"Difference to {literal(reference)}", x=0.01, ha="left", fontsize=11, fontweight="bold")
    grid = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)
    for axes, (each, values) in zip(grid.flat, drawn, strict=True):
        axes.axvline(0, color=styles[reference]["color"], linewidth=1.2)
        for row, (name, value) in enumerate(values.items()):
            style = styles[name]
            # Single seeds are drawn beside the interval, which would cover them.
            beside = [row + 0.22] * len(value.values)
            axes.scatter(value.values, beside, s=12, color=style["color"], alpha=0.45, linewidths=0)
            axes.errorbar(
                value.mean, row, xerr=value.half, color=style["color"], marker=style["marker"], markersize=5, capsize=3
            )
        axes.set_yticks(range(len(values)), [literal(name) for name in values])
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        measure = each.measure
        axes.set_xlabel(f"{measure.heading} ({measure.unit}), {measure.better} is better")
    return Picture("difference", DIFFERENCE, figure)


def by_depth(plan: Plan, done: Sequence[Outcome]) -> dict[str, list[tuple[int, Outcome]]]:
    """The finished variants by transition, with their number of loops; empty if no transition has several."""
    finished = {outcome.variant: outcome for outcome in done}
    lines: dict[str, list[tuple[int, Outcome]]] = {}
    for variant in plan.study.variants:
        config = plan.config(variant).model
        looped = [segment.loops for segment in config.segments if segment.loops is not None]
        if len(looped) == 1:
            name = ", ".join([config.loop.preset, *(f"{key} {value}" for key, value in config.loop.options.items())])
            lines.setdefault(name, []).extend([(looped[0], finished[variant])] if variant in finished else [])
    deepest = max((len({loops for loops, _ in points}) for points in lines.values()), default=0)
    return {name: sorted(points, key=lambda point: point[0]) for name, points in lines.items()} if deepest > 1 else {}


def _loops(plan: Plan, done: Sequence[Outcome]) -> Picture | None:
    """Figure 3 of the paper: the loss against the number of loops, a line for each transition."""
    lines = by_depth(plan, done)
    if not lines:
        return None
    measures = [measure for measure in MEASURES if any(measure.of(outcome) for outcome in done)]
    panels = [f"{measure.heading} ({measure.unit})" for measure in measures]
    figure, grid = axes_of("More loops", "mean over seeds", panels, sharey=False, xlabel="loops R")
    styles = styles_of([name.partition(",")[0] for name in lines])
    for axes, measure in zip(grid, measures, strict=True):
        for index, (points, style) in enumerate(zip(lines.values(), styles, strict=True)):
            # Variants stand side by side, since the intervals at one depth often overlap.
            aside = 0.06 * (index - (len(lines) - 1) / 2)
            values = [(loops + aside, estimate(list(measure.of(outcome).values()))) for loops, outcome in points]
            _seeds(axes, values, style)
            _errorbars(axes, values, style)
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.04), 1.04 if measure.percent else high)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, [Line2D([], [], label=name, **style) for name, style in zip(lines, styles, strict=True)])
    caption = (
        "Means over seeds with 95% intervals, small dots single seeds; every point is a model trained with that depth. "
        "Intervals are cut where no loss and no share can be."
    )
    return Picture("loops", caption, figure)


def _seeds(axes: Axes, points: Sequence[tuple[float, Estimate | None]], style: Mapping[str, Any]) -> None:
    """A small dot for every seed, beside its interval."""
    for place, value in points:
        if value is not None:
            beside = [place + 0.025] * len(value.values)
            axes.scatter(beside, value.values, s=12, color=style["color"], alpha=0.45, linewidths=0)


def _errorbars(axes: Axes, points: Sequence[tuple[float, Estimate | None]], style: Mapping[str, Any]) -> None:
    known = [(place, value) for place, value in points if value is not None]
    axes.errorbar(
        [place for place, _ in known],
        [value.mean for _, value in known],
        yerr=[0.0 if value.half is None else value.half for _, value in known],
        capsize=3,
        markersize=5,
        **style,
    )


def _state_norm(done: Sequence[Outcome], styles: Styles) -> Picture | None:
    """The state's RMS from loop to loop, relative to its start, before and after training."""
    looped = [outcome for outcome in done if growth(_first(outcome))]
    if not looped:
        return None
    figure, grid = axes_of(
        "Growth of the state", "RMS, start = 1", ["before training", "after training"], xlabel="loop"
    )
    seen = []
    for outcome in looped:
        style = styles[outcome.variant]
        for axes, line in zip(grid, (0, -1), strict=True):
            place = 0
            # Every looped segment has its own line, one after another.
            for runs in zip(*(growth(run) for run in outcome.runs.values()), strict=True):
                norms = np.stack([run[line] for run in runs])
                seen.append(norms.ravel())
                points = [(place + loop, estimate(column.tolist())) for loop, column in enumerate(norms.T)]
                _errorbars(axes, points, {**style, "linewidth": 1.3})
                place += len(points)
    log_scale(grid[0], np.concatenate(seen))
    legend(figure, [_handle(outcome.variant, styles) for outcome in looped])
    return Picture(
        "state_norm",
        "On validation text; a line begins with the state its loop starts with. Means over seeds with 95% intervals, "
        "which the logarithmic axis may cut.",
        figure,
    )


def _grad_norm(done: Sequence[Outcome], styles: Styles) -> Picture:
    figure, (axes,) = axes_of("Gradient norm", "global L2 norm, before clipping", [""])
    _lines(axes, {o.variant: [_curve(run, "grad_norm") for run in o.runs.values()] for o in done}, styles)
    legend(figure, [_handle(outcome.variant, styles) for outcome in done])
    return Picture("grad_norm", "Smoothed means over seeds with 95% intervals. " + SCALE, figure)


def _line(style: Mapping[str, Any]) -> dict[str, Any]:
    return {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.4}


def _handle(label: str, styles: Styles) -> Line2D:
    return Line2D([], [], label=label, **_line(styles[label]))
