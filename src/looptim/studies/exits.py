"""Which signal tells when a token has looped enough: what the exits of a study's runs say together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from matplotlib.figure import Figure

from ..evaluation.exits import OURS, PATIENT
from ..evaluation.frontier import envelope, frontier
from ..reporting.exits import signals_of
from ..reporting.plots import Picture
from ..reporting.style import LINESTYLES
from ..reporting.tables import Cell, Table
from .measures import Outcome
from .statistics import Estimate, differences, estimate, fit
from .tables import HALF_WIDTH

FIXED = "fixed depth"
POOLED = "all"

Records = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""By variant and seed."""


@final
class Measure(NamedTuple):
    """A number by which signals of a run are compared."""

    name: str
    title: str
    of: Callable[[Mapping[str, Any], str], float | None]
    form: str
    more_is_better: bool = False


def _loops(record: Mapping[str, Any], signal: str) -> float | None:
    # Runs of before, of an archive, were not asked for the fixed depth.
    known = record.get("fixed", {}) if signal == FIXED else record["signals"][signal]["chosen"]
    return known.get("loops")


GAP = Measure(
    "gap", "share of the oracle's gap", lambda record, signal: _of(record, signal, "gap closed"), "{:.2f}", True
)
ABOVE = Measure(
    "above", "loss above fixed depth, nats", lambda record, signal: _of(record, signal, "above fixed"), "{:.3f}"
)
LOOPS = Measure("loops", "mean loops that the risk bound allows", _loops, "{:.2f}")


def _of(record: Mapping[str, Any], signal: str, key: str) -> float | None:
    return record["signals"][signal].get(key)


def exit_tables(found: Sequence[Outcome]) -> list[Table]:
    """How every signal stands to fixed depth and oracle, how the local objective fares, what thresholds save."""
    records = {outcome.variant: outcome.exits for outcome in found if outcome.exits}
    if not records:
        return []
    differing = [_against(records, measure, OURS) for measure in (GAP, ABOVE, LOOPS)]
    patient = [name for name in _signals(records) if "+" in name]
    if PATIENT in patient and len(patient) > 1:
        differing.append(_against(records, ABOVE, PATIENT))
    return [_gaps(records), _above(records), *differing, _chosen(records), _kinds(records)]


def _signals(records: Records) -> list[str]:
    return signals_of(record for by_seed in records.values() for record in by_seed.values())


def shares(records: Records, measure: Measure, signal: str) -> dict[str, dict[int, float]]:
    """What a measure says of a signal, by variant and seed, where it says something."""
    rows = {
        variant: {seed: measure.of(record, signal) for seed, record in by_seed.items()}
        for variant, by_seed in records.items()
    }
    return {name: {seed: x for seed, x in row.items() if x is not None} for name, row in rows.items()}


def _cell(value: Estimate | None, form: str) -> Cell:
    return Cell(None) if value is None else Cell(value.mean, value.half, form=form)


def _means(records: Records, measure: Measure, names: Sequence[str]) -> dict[str, list[Cell]]:
    """A row of means over seeds for each variant, and one over all runs."""
    found = [shares(records, measure, name) for name in names]
    rows = {
        variant: [_cell(estimate(list(row[variant].values())), measure.form) for row in found] for variant in records
    }
    every = [[x for by_seed in row.values() for x in by_seed.values()] for row in found]
    return rows | {POOLED: [_cell(estimate(values), measure.form) for values in every]}


def _gaps(records: Records) -> Table:
    rows: list[list[str | Cell]] = []
    for variant, cells in _means(records, GAP, _signals(records)).items():
        by_seed = list(records.get(variant, {}).values())
        loss = estimate([record["static"][-1]["loss"] for record in by_seed])
        gain = estimate([record["static"][0]["loss"] - record["static"][-1]["loss"] for record in by_seed])
        rows.append([variant, _cell(loss, "{:.4f}"), _cell(gain, "{:.4f}"), *cells])
    notes = [
        "Of the area between two lines over mean loops: 0 is the static frontier, every token equally deep, 1 the best "
        "of oracles that know each token's loss after every loop at full depth (or its hops); negative is worse than "
        "the static frontier. Of two policies of frontier or oracle each window may have either.",
        "± is a 95% interval over seeds (Student), of the last row over all runs. Prefill has exits too.",
    ]
    header = ["model", "loss, all loops", "gain over one loop", *_signals(records)]
    title = "Share of the oracle's gap that is closed at equal mean loops"
    return Table("exits_gap", title, header, rows, notes, error=HALF_WIDTH, labels=1)


def _above(records: Records) -> Table:
    rows: list[list[str | Cell]] = [[name, *cells] for name, cells in _means(records, ABOVE, _signals(records)).items()]
    notes = [
        "Nats above the static frontier at equal mean loops, the mean over loops; negative is better than every token "
        "equally deep. Unlike a share it does not grow where the oracle's gap is small. ± as above."
    ]
    title = "Loss above that of fixed depth at equal mean loops"
    return Table("exits_above", title, ["model", *_signals(records)], rows, notes, error=HALF_WIDTH, labels=1)


def against(records: Records, measure: Measure, ours: str = OURS) -> dict[str, dict[str, Estimate | None]]:
    """Ours minus every other signal, by signal and variant, and over all runs; each family has intervals of its own.

    With patience, ours is held against the others with patience.
    """
    others = [signal for signal in _signals(records) if signal != ours and ("+" in signal or ours == OURS)]
    if measure is LOOPS:
        others.append(FIXED)
    # A block is a run: signals are compared within it.
    blocks = {
        signal: {
            variant: {place * 1000 + seed: value for seed, value in row.items()}
            for place, (variant, row) in enumerate(shares(records, measure, signal).items())
        }
        for signal in [ours, *others]
    }
    within = {f"{signal} of {variant}": row for signal, rows in blocks.items() for variant, row in rows.items()}
    pairs = [(f"{ours} of {variant}", f"{other} of {variant}") for other in others for variant in records]
    single = differences(fit(within), pairs)
    every = {signal: {key: x for row in rows.values() for key, x in row.items()} for signal, rows in blocks.items()}
    pooled = differences(fit(every), [(ours, other) for other in others])
    return {
        other: {variant: single[f"{ours} of {variant}", f"{other} of {variant}"] for variant in records}
        | {POOLED: pooled[ours, other]}
        for other in others
    }


def verdict(value: Estimate | None, *, more_is_better: bool = True) -> str:
    """
    >>> verdict(Estimate(0.2, 0.1, ())), verdict(Estimate(0.2, 0.3, ())), verdict(None)
    ('better', 'cannot tell', 'cannot tell')
    """
    if value is None or not value.is_seen:
        return "cannot tell"
    return "better" if (value.mean > 0) == more_is_better else "worse"


def _against(records: Records, measure: Measure, ours: str) -> Table:
    rows: list[list[str | Cell]] = []
    for other, by_variant in against(records, measure, ours).items():
        cells = [_cell(value, measure.form.replace(":", ":+")) for value in by_variant.values()]
        rows.append([f"{ours} − {other}", *cells, verdict(by_variant[POOLED], more_is_better=measure.more_is_better)])
    better = "Positive" if measure.more_is_better else "Negative"
    notes = [
        f"Differences within runs. ± is a 95% interval that holds for all differences of a family at once: one family "
        "is all models and signals apart, the other the last column but one, over all runs, which takes differences "
        f"between models for noise. {better}: the local objective is better.",
    ]
    header = ["difference", *records, POOLED, "verdict over all runs"]
    others = "other signals" if ours == OURS else "the others, all with a loop of patience"
    title = f"The local objective against {others}: {measure.title}"
    name = f"exits_{'against' if ours == OURS else 'patient'}_{measure.name}"
    return Table(name, title, header, rows, notes, error=HALF_WIDTH, labels=1)


def _chosen(records: Records) -> Table:
    rows: list[list[str | Cell]] = []
    for variant, by_seed in records.items():
        chosen = {
            signal: [record["signals"][signal]["chosen"] for record in by_seed.values()] for signal in _signals(records)
        }
        loops = [estimate([row["loops"] for row in each]) for each in chosen.values()]
        fixed = [record["fixed"] for record in by_seed.values() if "fixed" in record]
        least = _cell(estimate([row["loops"] for row in fixed]), "{:.2f}")
        rows.append([variant, "mean loops", least, *(_cell(value, "{:.2f}") for value in loops)])
        more = [estimate([row["more loss"] for row in each]) for each in chosen.values()]
        lost = _cell(estimate([row["more loss"] for row in fixed]), "{:+.4f}")
        rows.append([variant, "more loss, nats", lost, *(_cell(value, "{:+.4f}") for value in more)])
        random = [record["random"]["loss"] - record["static"][-1]["loss"] for record in by_seed.values()]
        same = [_cell(estimate(random), "{:+.4f}") if name == OURS else Cell(None) for name in chosen]
        rows.append([variant, "the same of random exits", Cell(None), *same])
    settings = next(iter(next(iter(records.values())).values()))["settings"]
    risk, sure = settings["risk"], settings["confidence"]
    notes = [
        f"Each run's threshold is the last of a row at which the loss is shown to rise by at most {risk:.0%}, below 1 "
        f"nat by {risk:g} nats (confidence {sure:.0%}), on half of {settings['windows']} held-out windows; the numbers "
        "are of the other half. Means over seeds, ± a 95% interval.",
    ]
    header = ["model", "", FIXED, *_signals(records)]
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
    drawn = [signal for signal in _signals(records) if "+" not in signal or signal in (PATIENT, _best_patient(records))]
    for axes, (variant, by_seed) in zip(panels.flat, records.items(), strict=False):
        seeds = list(by_seed.values())
        for place, signal in enumerate(drawn):
            style = LINESTYLES[place % len(LINESTYLES)]
            width = 2.2 if signal == OURS else 1.0
            curves = [[*record["signals"][signal]["curve"], record["static"][-1]] for record in seeds]
            axes.plot(*_mean_curve(curves, seeds), linestyle=style, linewidth=width, label=signal)
        statics = [record["static"] for record in seeds]
        axes.plot(*_mean_curve(statics, seeds), color="black", linewidth=1.4, label="every token equally deep")
        oracles = [envelope([*record["oracle"], *record["static"]]) for record in seeds]
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


def _best_patient(records: Records) -> str | None:
    """The signal with a loop of patience that does best against fixed depth: too many lines would be unreadable."""
    patient = [name for name in _signals(records) if "+" in name]
    means = {name: [x for row in shares(records, ABOVE, name).values() for x in row.values()] for name in patient}
    return min((name for name in patient if means[name]), key=lambda name: statistics.fmean(means[name]), default=None)


def _mean_curve(
    curves: Sequence[Sequence[Mapping[str, float]]], seeds: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """The mean of curves where all of them reach, over the loss of all loops."""
    lines = [frontier(curve) for curve in curves]
    low, high = max(loops[0] for loops, _ in lines), min(loops[-1] for loops, _ in lines)
    places = np.linspace(low, high, 60)
    full = statistics.fmean(record["static"][-1]["loss"] for record in seeds)
    return places, np.mean([np.interp(places, *line) for line in lines], axis=0) - full
