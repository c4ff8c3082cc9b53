"""The table and the figure of the recurrence-equivalence exponent, from the runs of a study."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator

from ..config import ModelConfig
from ..model import LoopedLM
from ..reporting.page import Group, Page, forest
from ..reporting.plots import Picture, axes_of
from ..reporting.style import styles_of
from ..reporting.tables import Cell, Table
from .measures import Outcome, data_of
from .phi import Point, as_json, bootstrap, fit, interval, is_identified
from .spec import Plan
from .tables import held_out

FILE = "phi.json"
"""Points, fit and the draws of the bootstrap, in the folder of a study."""
PUBLISHED = {
    "truncated backpropagation": (0.38, 0.38, 0.38),
    "plain loop": (0.459, 0.41, 0.53),
    "hyper-connections": (0.65, 0.65, 0.65),
}
"""Of arXiv 2604.21106, at 4e17 FLOP and more: phi, and its interval, which has no width where none is given."""


CAPTION = (
    "0: a loop is worth nothing; 1: as much as blocks with parameters of their own. Bars are 95% intervals of a block "
    "bootstrap; published values are from far larger models."
)


def points_of(plan: Plan, found: Sequence[Outcome]) -> list[Point]:
    """Every finished run as a point; that all have the same numerics is checked."""
    assert plan.study.phi is not None
    outcomes = {outcome.variant: outcome for outcome in found}
    _check_numerics(found)
    points = []
    for member in plan.study.phi.members():
        config = plan.config(member.name)
        once, looped = block_parameters(config.model)
        tokens = config.train.steps * config.train.batch_size * config.train.seq_len
        for loss in outcomes[member.name].loss.values():
            points.append(Point(member.transition, member.loops, once, looped, tokens, loss))
    return points


def block_parameters(config: ModelConfig) -> tuple[int, int]:
    """Parameters of the blocks outside and inside the loops; at one loop it makes no difference where they count.

    >>> block_parameters(ModelConfig.tiny(layout="1-1x2-1")) == block_parameters(ModelConfig.tiny(layout="1-1x5-1"))
    True
    """
    with torch.device("meta"):
        model = LoopedLM(config, seed=0)
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
    once, looped, place = 0, 0, 0
    for segment in config.segments:
        size = sum(sizes[place : place + segment.blocks])
        once, looped = (once + size, looped) if segment.loops is None else (once, looped + size)
        place += segment.blocks
    return once, looped


def _check_numerics(found: Sequence[Outcome]) -> None:
    """Runs of another looptim or torch may differ by more than loops do."""
    seen: dict[str, str] = {}
    for outcome in found:
        for seed, run in outcome.runs.items():
            # The first numerics were recorded in no run.
            record = {"numerics": 1, **run.environment}
            kind = ", ".join(f"{key} {record[key]}" for key in ("numerics", "looptim", "torch") if key in record)
            seen.setdefault(kind, f"{outcome.variant}, seed {seed}")
    if len(seen) > 1:
        said = "; ".join(f"{run} has {kind}" for kind, run in list(seen.items())[:2])
        raise ValueError(f"runs of different numerics cannot be fitted together ({said}); train them with one version")


def measure(points: Sequence[Point], file: Path, *, draws: int = 200) -> dict[str, Any] | None:
    """Fit and draws, as they are written; those in `file` where it is of the same points.

    None as long as the runs do not have two budgets, two sizes and a transition of two numbers of loops.
    """
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        if before.get("points") == [list(point) for point in points]:
            return before
    unrolled = {point.once + point.loops * point.looped for point in points}
    loops = {point.loops for point in points}
    if min(map(len, ({point.tokens for point in points}, unrolled, loops))) < 2 or 1 not in loops:
        return None
    fitted = fit(points)
    return {"points": [list(point) for point in points], **as_json(fitted, bootstrap(points, fitted, draws=draws))}


def table(plan: Plan, measured: Mapping[str, Any] | None, found: Sequence[Outcome]) -> Table:
    """Every transition's exponent with its interval, and what is to be known of the fit."""
    header = ["transition", "phi", "95% interval", "identified", "runs"]
    rows: list[list[str | Cell]] = []
    if measured is not None:
        runs = _runs(measured)
        for name, draws in measured["draws"].items():
            low, high = interval(draws)
            known = "yes" if is_identified(draws) else "no"
            value = Cell(measured["phi"][name], form="{:.2f}")
            rows.append([name, value, f"{low:.2f} to {high:.2f}", known, runs[name]])
    return Table(plan.name, plan.study.title, header, rows, _notes(plan, measured, found), labels=1)


def _runs(measured: Mapping[str, Any]) -> dict[str, str]:
    names = [Point(*point).transition for point in measured["points"]]
    return {name: str(names.count(name)) for name in measured["phi"]}


def _notes(plan: Plan, measured: Mapping[str, Any] | None, found: Sequence[Outcome]) -> list[str]:
    done, wanted = sum(len(outcome.runs) for outcome in found), len(plan.cells)
    missing = [] if done == wanted else [f"{wanted - done} of {wanted} runs are not finished."]
    if measured is None:
        return [*missing, "A fit needs finished runs of two budgets, two widths and, beside plain ones, of loops."]
    law = measured["law"]
    shared = sum(Point(*point).transition is None for point in measured["points"])
    largest = max(6 * (p.once + p.loops * p.looped) * p.tokens for p in map(Point._make, measured["points"]))
    return [
        "L = E + A (N_once + r^phi N_rec)^-alpha + B D^-beta, one law for all transitions: "
        f"E {np.exp(law['log E']):.3f}, alpha {law['alpha']:.2f}, beta {law['beta']:.2f}; R^2 of log L "
        f"{measured['r2']:.4f}, with phi = 0 {measured['r2_at']['0']:.4f}, with phi = 1 {measured['r2_at']['1']:.4f}.",
        f"All transitions share {shared} runs that are not looped. Intervals are the middle 95% of "
        f"{len(next(iter(measured['draws'].values())))} draws of a bootstrap over blocks of one budget and one number "
        "of loops; an interval wider than from 0 to 1 identifies nothing.",
        f"The largest run has {largest:.1e} FLOP, by 6 N D; the published exponents (plain loop 0.459 [0.41, 0.53], "
        "hyper-connections 0.65, truncated backpropagation 0.38) are of 4e17 and more.",
        f"Losses are those of the last validation, in nats per token.{held_out(data_of(found))}",
        *plan.notes,
        *missing,
    ]


def with_exponents(page: Page, plan: Plan, measured: Mapping[str, Any]) -> Page:
    """The page with the same as a figure: every exponent with its interval, beside the published ones."""
    assert plan.study.phi is not None
    styles = styles_of([plan.study.phi.transitions[name].preset for name in measured["phi"]])
    gray = {"color": "#777777", "linestyle": "-"}
    groups = [Group(name, style) for name, style in zip(measured["phi"], styles, strict=True)]
    groups += [Group(f"{name} (published)", gray) for name in PUBLISHED]
    ours = [(value, interval(measured["draws"][name])) for name, value in measured["phi"].items()]
    others = [(value, (low, high) if low < high else None) for value, low, high in PUBLISHED.values()]
    rows = [(group, value, ends, ()) for group, (value, ends) in enumerate([*ours, *others])]
    figure = forest("What a loop is worth", CAPTION, "exponent φ", rows, marks=(0, 1), signed=False)
    return dataclasses.replace(page, groups=groups, forests=[figure])


def picture(plan: Plan, measured: Mapping[str, Any]) -> Picture:
    """Every transition's exponent with its interval, beside the published ones."""
    assert plan.study.phi is not None
    names = list(measured["phi"])
    figure, (axes,) = axes_of("What a loop is worth", "", [""], xlabel="recurrence-equivalence exponent φ")
    styles = styles_of([plan.study.phi.transitions[name].preset for name in names])
    for row, (name, style) in enumerate(zip(names, styles, strict=True)):
        low, high = interval(measured["draws"][name])
        axes.plot([low, high], [row, row], color=style["color"], linewidth=1.6)
        axes.plot(measured["phi"][name], row, color=style["color"], marker=style["marker"], markersize=6)
    for row, (value, low, high) in enumerate(PUBLISHED.values(), len(names)):
        axes.plot([low, high], [row, row], color="gray", linewidth=1.6)
        axes.plot(value, row, color="gray", marker="o", fillstyle="none")
    labels = [*names, *(f"{name} (published)" for name in PUBLISHED)]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    for place in (0, 1):
        axes.axvline(place, color="gray", linewidth=0.8, linestyle=":")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(axis="y", visible=False)
    figure.set_size_inches(5.6, 1.4 + 0.3 * len(labels))
    return Picture("phi", CAPTION, figure)
