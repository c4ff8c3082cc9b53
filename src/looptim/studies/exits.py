"""Which signal tells when a token has looped enough: what the exits of a study's runs say together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..evaluation.frontier import frontier, mixed
from ..reporting.exits import signals_of
from ..reporting.plots import Picture
from ..reporting.style import LINESTYLES
from ..reporting.tables import Cell, Table
from .measures import Outcome
from .statistics import Estimate, differences, estimate, fit
from .tables import HALF_WIDTH

OURS = "residual"
"""The local objective."""
POOLED = "all"

Records = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""By variant and seed."""


def exit_tables(found: Sequence[Outcome]) -> list[Table]:
    """How much of the oracle's gap every signal closes, how the local objective fares, what thresholds save."""
    records = {outcome.variant: outcome.exits for outcome in found if outcome.exits}
    return [_gaps(records), _against(records), _chosen(records), _kinds(records)] if records else []


def _signals(records: Records) -> list[str]:
    return signals_of(record for by_seed in records.values() for record in by_seed.values())


def gaps(records: Records, signal: str) -> dict[str, dict[int, float]]:
    """The share of the oracle's gap that a signal closes, by variant and seed, where there is a gap."""
    shares = {
        variant: {seed: record["signals"][signal]["gap closed"] for seed, record in by_seed.items()}
        for variant, by_seed in records.items()
    }
    return {name: {seed: x for seed, x in row.items() if x is not None} for name, row in shares.items()}


def _cell(value: Estimate | None, form: str) -> Cell:
    return Cell(None) if value is None else Cell(value.mean, value.half, form=form)


def _gaps(records: Records) -> Table:
    rows: list[list[str | Cell]] = []
    for variant, by_seed in records.items():
        loss = [record["static"][-1]["loss"] for record in by_seed.values()]
        gain = [record["static"][0]["loss"] - record["static"][-1]["loss"] for record in by_seed.values()]
        shares = [estimate(list(gaps(records, signal)[variant].values())) for signal in _signals(records)]
        row = [_cell(estimate(loss), "{:.4f}"), _cell(estimate(gain), "{:.4f}")]
        rows.append([variant, *row, *(_cell(share, "{:.2f}") for share in shares)])
    every = [[x for row in gaps(records, signal).values() for x in row.values()] for signal in _signals(records)]
    rows.append([POOLED, Cell(None), Cell(None), *(_cell(estimate(values), "{:.2f}") for values in every)])
    notes = [
        "Of the area between two lines over mean loops: 0 is the static frontier, every token equally deep, 1 the best "
        "of oracles that know each token's loss after every loop at full depth (or its hops); negative is worse than "
        "the static frontier. Of two policies of frontier or oracle each window may have either.",
        "± is a 95% interval over seeds (Student), of the last row over all runs. Prefill has exits too.",
    ]
    header = ["model", "loss, all loops", "gain over one loop", *_signals(records)]
    title = "Share of the oracle's gap that is closed at equal mean loops"
    return Table("exits_gap", title, header, rows, notes, error=HALF_WIDTH, labels=1)


def against(records: Records) -> dict[str, dict[str, Estimate | None]]:
    """Ours minus every other signal, by signal and variant, and over all runs; each family has intervals of its own."""
    others = [signal for signal in _signals(records) if signal != OURS]
    # A block is a run: signals are compared within it.
    within = {
        f"{signal} of {variant}": {place * 1000 + seed: value for seed, value in row.items()}
        for signal in [OURS, *others]
        for place, (variant, row) in enumerate(gaps(records, signal).items())
    }
    pairs = [(f"{OURS} of {variant}", f"{other} of {variant}") for other in others for variant in records]
    single = differences(fit(within), pairs)
    pooled_table = {
        signal: {
            place * 1000 + seed: value
            for place, row in enumerate(gaps(records, signal).values())
            for seed, value in row.items()
        }
        for signal in [OURS, *others]
    }
    pooled = differences(fit(pooled_table), [(OURS, other) for other in others])
    return {
        other: {variant: single[f"{OURS} of {variant}", f"{other} of {variant}"] for variant in records}
        | {POOLED: pooled[OURS, other]}
        for other in others
    }


def verdict(value: Estimate | None) -> str:
    """
    >>> verdict(Estimate(0.2, 0.1, ())), verdict(Estimate(0.2, 0.3, ())), verdict(None)
    ('better', 'cannot tell', 'cannot tell')
    """
    if value is None or not value.is_seen:
        return "cannot tell"
    return "better" if value.mean > 0 else "worse"


def _against(records: Records) -> Table:
    rows: list[list[str | Cell]] = []
    for other, by_variant in against(records).items():
        cells = [_cell(value, "{:+.2f}") for value in by_variant.values()]
        rows.append([f"{OURS} − {other}", *cells, verdict(by_variant[POOLED])])
    notes = [
        "Differences in the share of the oracle's gap, within runs. ± is a 95% interval that holds for all differences "
        "of a family at once: one family is all models and signals apart, the other the last column but one, over all "
        "runs. Positive: the local objective is better.",
    ]
    header = ["difference", *records, POOLED, "verdict over all runs"]
    title = "The local objective against other signals"
    return Table("exits_against", title, header, rows, notes, error=HALF_WIDTH, labels=1)


def _chosen(records: Records) -> Table:
    rows: list[list[str | Cell]] = []
    for variant, by_seed in records.items():
        chosen = {
            signal: [record["signals"][signal]["chosen"] for record in by_seed.values()] for signal in _signals(records)
        }
        loops = [estimate([row["loops"] for row in each]) for each in chosen.values()]
        rows.append([variant, "mean loops", *(_cell(value, "{:.2f}") for value in loops)])
        more = [estimate([row["more loss"] for row in each]) for each in chosen.values()]
        rows.append([variant, "more loss, nats", *(_cell(value, "{:+.4f}") for value in more)])
        random = [record["random"]["loss"] - record["static"][-1]["loss"] for record in by_seed.values()]
        same = [_cell(estimate(random), "{:+.4f}") if name == OURS else Cell(None) for name in chosen]
        rows.append([variant, "the same of random exits", *same])
    settings = next(iter(next(iter(records.values())).values()))["settings"]
    risk, sure = settings["risk"], settings["confidence"]
    notes = [
        f"Each run's threshold is the last of a row at which the loss is shown to rise by at most {risk:.0%}, below 1 "
        f"nat by {risk:g} nats (confidence {sure:.0%}), on half of {settings['windows']} held-out windows; the numbers "
        "are of the other half. Means over seeds, ± a 95% interval.",
    ]
    header = ["model", "", *_signals(records)]
    return Table("exits_chosen", "Thresholds that a risk bound allows", header, rows, notes, error=HALF_WIDTH, labels=2)


def _kinds(records: Records) -> Table:
    kinds = list(
        dict.fromkeys(k for by_seed in records.values() for record in by_seed.values() for k in record["kinds"])
    )
    rows: list[list[str | Cell]] = []
    for variant, by_seed in records.items():
        depths = [
            [record["kinds"][kind]["loops"] for record in by_seed.values() if kind in record["kinds"]] for kind in kinds
        ]
        rows.append([variant, *(_cell(estimate(each), "{:.2f}") for each in depths)])
    notes = ["Mean loops under the chosen threshold of the local objective, over seeds, ± a 95% interval."]
    title = "Depth by kind of token"
    return Table("exits_kinds", title, ["model", *kinds], rows, notes, error=HALF_WIDTH, labels=1)


def exit_pictures(found: Sequence[Outcome]) -> list[Picture]:
    """Loss over that of all loops against mean loops, a panel for each variant, the mean over its seeds."""
    records = {outcome.variant: outcome.exits for outcome in found if outcome.exits}
    if not records:
        return []
    columns = min(3, len(records))
    rows = -(-len(records) // columns)
    figure = Figure(figsize=(3.0 * columns + 0.6, 2.5 * rows + 0.9), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, (variant, by_seed) in zip(panels.flat, records.items(), strict=False):
        seeds = list(by_seed.values())
        for place, signal in enumerate(_signals(records)):
            style = LINESTYLES[place % len(LINESTYLES)]
            width = 2.2 if signal == OURS else 1.0
            curves = [[*record["signals"][signal]["curve"], record["static"][-1]] for record in seeds]
            axes.plot(*_mean_curve(curves, seeds), linestyle=style, linewidth=width, label=signal)
        statics = [record["static"] for record in seeds]
        axes.plot(*_mean_curve(statics, seeds), color="black", linewidth=1.4, label="every token equally deep")
        oracles = [_best([*record["oracle"], *record["static"]]) for record in seeds]
        axes.plot(*_mean_curve(oracles, seeds), ":", color="gray", label="oracle")
        axes.set_title(variant, fontsize=9)
    for axes in list(panels.flat)[len(records) :]:
        axes.set_visible(False)
    figure.supxlabel("mean loops of a predicted token", fontsize=9)
    figure.supylabel("loss over that of all loops, nats", fontsize=9)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=7)
    caption = "Means over seeds; every point was run for real, with exits in prefill too."
    return [Picture("exits", caption, figure)]


def _best(points: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The least loss at each mean of loops, where every window may have either of two policies."""
    places = np.linspace(1.0, max(point["loops"] for point in points), 61)
    losses = mixed([dict(point) for point in points], places)
    return [{"loops": float(x), "loss": float(y)} for x, y in zip(places, losses, strict=True)]


def _mean_curve(
    curves: Sequence[Sequence[Mapping[str, float]]], seeds: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """The mean of curves where all of them reach, over the loss of all loops."""
    lines = [frontier(curve) for curve in curves]
    low, high = max(loops[0] for loops, _ in lines), min(loops[-1] for loops, _ in lines)
    places = np.linspace(low, high, 60)
    full = statistics.fmean(record["static"][-1]["loss"] for record in seeds)
    return places, np.mean([np.interp(places, *line) for line in lines], axis=0) - full
