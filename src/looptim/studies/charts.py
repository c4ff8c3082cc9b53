"""Charts of a study's page: the seeds of every variant over training, and the differences between variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..reporting.page import Chart, Group, Line, Page, forest
from ..reporting.style import styles_of
from ..rundir import Run
from .figures import DIFFERENCE, by_depth, loss_minus
from .measures import MEASURES, Comparison, Outcome, growth
from .spec import Plan
from .statistics import Estimate, estimate

BANDS = "Lines are means over seeds, each seed smoothed; bands are 95% intervals, each for itself."


def first_of(outcome: Outcome) -> Run:
    """The run of the first seed."""
    return next(iter(outcome.runs.values()))


def groups(plan: Plan, done: Sequence[Outcome]) -> list[Group]:
    """The variants that have runs. Looks are assigned to all variants at once, so they stay the same as runs finish."""
    variants = plan.study.variants
    styles = dict(zip(variants, styles_of([variant.preset for variant in variants.values()]), strict=True))
    return [Group(each.variant, styles[each.variant], first_of(each).bits_per_byte) for each in done]


def charts(plan: Plan, done: Sequence[Outcome]) -> list[Chart]:
    """Every chart that has numbers; the loss comes first."""
    reference = next((outcome.runs for outcome in done if outcome.variant == plan.study.reference), {})
    made = [
        _loss(done),
        _minus(done, reference, plan.study.reference),
        *_depths(plan, done),
        *_growth(done),
        Chart("grad_norm", "Gradient norm", BANDS, "global L2 norm", _seeds(done, "grad_norm"), log=True, noisy=True),
    ]
    return [chart for chart in made if chart.lines]


def _seeds(done: Sequence[Outcome], key: str, part: str = "", *, marks: bool = False) -> list[Line]:
    columns = [(group, run.column(key)) for group, outcome in enumerate(done) for run in outcome.runs.values()]
    return [Line(group, part, *both, marks=marks) for group, both in columns if len(both[0])]


def _loss(done: Sequence[Outcome]) -> Chart:
    lines = _seeds(done, "loss", "training") + _seeds(done, "valid_loss", "validation", marks=True)
    caption = f"{BANDS} Open marks are validation."
    return Chart("loss", "Loss", caption, "nats per token", lines, noisy=True, loss=True)


def _minus(done: Sequence[Outcome], reference: Mapping[int, Run], name: str) -> Chart:
    """The training loss minus that of the reference, seed by seed."""
    lines = []
    for group, outcome in enumerate(done):
        for seed in outcome.runs.keys() & reference.keys():
            lines.append(Line(group, "", *loss_minus(outcome.runs[seed], reference[seed])))
    title = f"Training loss minus that of {name}"
    return Chart("difference", title, f"Paired by seed. {BANDS}", "nats per token", lines, noisy=True, loss=True)


def _depths(plan: Plan, done: Sequence[Outcome]) -> list[Chart]:
    """Every measure over the number of loops that models were trained with."""
    made = []
    for measure in (each for each in MEASURES if any(each.of(outcome) for outcome in done)):
        lines = []
        for name, points in by_depth(plan, done).items():
            values = [(loops, estimate(list(measure.of(outcome).values()))) for loops, outcome in points]
            lines += _intervals(done.index(points[0][1]) if points else 0, name, values)
        caption = "Means over seeds with 95% intervals; every point is a model trained with that depth."
        title = f"More loops: {measure.heading}"
        made.append(Chart(f"loops {measure.key}", title, caption, measure.unit, lines, x="loops R", named=True))
    return made


def _growth(done: Sequence[Outcome]) -> list[Chart]:
    """The state's RMS from loop to loop, relative to its start, before and after training."""
    made = []
    for title, line in (("before training", 0), ("after training", -1)):
        lines = []
        for group, outcome in enumerate(done):
            place = 0
            # Every looped segment has its own line, one after another.
            for segment, runs in enumerate(zip(*(growth(run) for run in outcome.runs.values()), strict=True), 1):
                columns = np.stack([run[line] for run in runs]).T
                points = [(place + loop, estimate(column.tolist())) for loop, column in enumerate(columns)]
                lines += _intervals(group, f"segment {segment}" if segment > 1 else "", points)
                place += len(points)
        caption = "On validation text, from the state that a loop starts with. Means over seeds with 95% intervals."
        name = f"Growth of the state, {title}"
        made.append(Chart(f"state {title}", name, caption, "RMS, start = 1", lines, x="loop", log=True))
    return made


def _intervals(group: int, part: str, points: Sequence[tuple[float, Estimate | None]]) -> list[Line]:
    """A line of means with their intervals, if there are any."""
    known = [(place, value) for place, value in points if value is not None]
    x, y = [place for place, _ in known], [value.mean for _, value in known]
    half = None if any(value.half is None for _, value in known) else [value.half for _, value in known]
    return [Line(group, part, x, y, half)] if known else []


def with_running(page: Page, running: Mapping[str, Run], *, watch: float) -> Page:
    """The page while runs train: their losses so far, each run for itself, read again every `watch` seconds."""
    styles = styles_of([run.preset for run in running.values()])
    names = zip(running.items(), styles, strict=True)
    more = [Group(f"{name} (training)", style, run.bits_per_byte) for (name, run), style in names]
    lines = []
    for group, run in enumerate(running.values(), len(page.groups)):
        columns = {"training": run.column("loss"), "validation": run.column("valid_loss")}
        lines += [
            Line(group, part, *both, marks=part == "validation") for part, both in columns.items() if len(both[0])
        ]
    shown = list(page.charts)
    loss = shown.pop(0) if shown and shown[0].key == "loss" else _loss([])
    whole = dataclasses.replace(loss, lines=[*loss.lines, *lines])
    charts = [*([whole] if whole.lines else []), *shown]
    return dataclasses.replace(page, groups=[*page.groups, *more], charts=charts, watch=watch)


def forests(done: Sequence[Outcome], compared: Sequence[Comparison], reference: str) -> list[dict[str, Any]]:
    """Every variant minus the reference in every measure, with interval and single seeds."""
    places = {outcome.variant: group for group, outcome in enumerate(done)}
    made = []
    for each in compared:
        known = {name: value for name, value in each.to_reference.items() if value is not None and name in places}
        rows = [(places[name], value.mean, _ends(value), value.values) for name, value in known.items()]
        measure = each.measure
        title, x = f"Difference to {reference}: {measure.heading}", f"{measure.unit}, {measure.better} is better"
        made += [forest(title, DIFFERENCE, x, rows)] if rows else []
    return made


def _ends(value: Estimate) -> tuple[float, float] | None:
    return None if value.half is None else (value.mean - value.half, value.mean + value.half)
