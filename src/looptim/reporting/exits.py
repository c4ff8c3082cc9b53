"""What exits cost and save, as tables, figures and a page: of one run, or of several over seeds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..evaluation.frontier import envelope, frontier
from ..rundir import RunDir
from .page import Chart, Group, Line, Page, write_report
from .plots import Picture, render
from .style import LINESTYLES, styles_of
from .tables import Cell, Table, markdown

Record = Mapping[str, Any]


def read_exits(runs: Iterable[str | Path]) -> list[dict[str, Any]]:
    """What `looptim evaluate RUN --exits` wrote for each run."""
    found = []
    for run in runs:
        record = RunDir(run).exits.read()
        if record is None:
            raise ValueError(f"{run} has no eval/exits.json; run `looptim evaluate {run} --exits` first")
        found.append(record)
    return found


def report_exits(records: Sequence[Record], out: str | Path) -> Path:
    """Write exits.md, exits.html and the figures; returns the page."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[name_of(record)].append(record)
    tables = [gap_table(groups), *(chosen_table(name, group) for name, group in groups.items())]
    tables += [histogram_table(groups), kind_table(groups)]
    if any("speed" in record for record in records):
        tables.append(speed_table(groups))
    pictures, files = render(lambda: [draw(name, group[0]) for name, group in groups.items()])
    page = Page("Exits", *_charts({name: group[0] for name, group in groups.items()}), tables=tables)
    out = Path(out)
    files |= {"exits.md": markdown(tables).encode(), "exits.html": page.html().encode()}
    write_report(out, files, figures=[picture.name for picture in pictures])
    return out / "exits.html"


def name_of(record: Record) -> str:
    """The transition and the data that a run is known by, whatever its seed."""
    settings = record["settings"]
    options = ", ".join(f"{key} {value}" for key, value in settings["options"].items())
    return f"{settings['preset']}{f' ({options})' if options else ''}, {settings['source']}, {settings['layout']}"


def _mean(values: Iterable[float | None], form: str = "{:.3f}") -> Cell:
    """The mean over seeds and, where there are several, its standard error."""
    known = [value for value in values if value is not None]
    if not known:
        return Cell(None)
    error = statistics.stdev(known) / len(known) ** 0.5 if len(known) > 1 else None
    return Cell(statistics.fmean(known), error, form=form)


def signals_of(records: Iterable[Record]) -> list[str]:
    """The signals that all of these have: not every run was asked for all, and a loop without coda has fewer."""
    found = [record["signals"] for record in records]
    return [name for name in found[0] if all(name in signals for signals in found)]


def gap_table(groups: Mapping[str, Sequence[Record]]) -> Table:
    """How much of the oracle's gap each signal closes."""
    signals = signals_of(record for group in groups.values() for record in group)
    rows: list[list[str | Cell]] = []
    for name, group in groups.items():
        cells = [_mean((record["signals"][signal]["gap closed"] for record in group), "{:.2f}") for signal in signals]
        gain = _mean(record["static"][0]["loss"] - record["static"][-1]["loss"] for record in group)
        rows.append([name, Cell(len(group), form="{:.0f}"), gain, *cells])
    notes = [
        "Of the area between two lines over mean loops: 0 is the static frontier, every token equally deep, 1 the best "
        "of the oracles; negative is worse than the static frontier.",
        "± is a standard error over seeds. The oracle knows each token's loss after every loop at full depth.",
    ]
    header = ["model", "seeds", "gain of all loops, nats", *signals]
    return Table("gap", "Share of the oracle's gap that is closed at equal mean loops", header, rows, notes)


def chosen_table(name: str, group: Sequence[Record]) -> Table:
    """The threshold of each signal that the risk bound allows, on windows that did not choose it."""
    settings = group[0]["settings"]
    rows: list[list[str | Cell]] = []
    for signal in signals_of(group):
        chosen = [record["signals"][signal]["chosen"] for record in group]
        rows.append(
            [
                signal,
                _mean((row["threshold"] for row in chosen), "{:.3g}"),
                _mean((row["loops"] for row in chosen), "{:.2f}"),
                _mean((row["loss"] for row in chosen), "{:.4f}"),
                _mean((row["more loss"] for row in chosen), "{:+.4f}"),
            ]
        )
    rows.append(_control("random, the shares of residual", [record["random"] for record in group]))
    if all("fixed" in record for record in group):
        rows.append(_control("fixed depth, by the same bound", [record["fixed"] for record in group]))
    rows += [
        _control(f"every token, {_loops(i + 1)}", [r["static"][i] for r in group])
        for i in range(len(group[0]["static"]))
    ]
    risk, sure = settings["risk"], settings["confidence"]
    notes = [
        f"Chosen so that the loss rises by at most {risk:.0%} (below 1 nat: {risk:g} nats), at a confidence of "
        f"{sure:.0%}; reported elsewhere.",
        f"Prefill: {settings['prefill']}. {settings['windows']} windows a run, half to choose by.",
    ]
    return Table(
        "chosen", f"Chosen: {name}", ["signal", "threshold", "mean loops", "loss", "more loss, nats"], rows, notes
    )


def _control(name: str, rows: Sequence[Mapping[str, float]]) -> list[str | Cell]:
    forms = {"loops": "{:.2f}", "loss": "{:.4f}", "more loss": "{:+.4f}"}
    return [name, Cell(None), *(_mean((row.get(key) for row in rows), form) for key, form in forms.items())]


def _loops(number: int) -> str:
    return f"{number} loop" + "s" * (number > 1)


def histogram_table(groups: Mapping[str, Sequence[Record]]) -> Table:
    """Which share of the tokens leaves after each number of loops, under the chosen thresholds."""
    deepest = max(len(record["static"]) for group in groups.values() for record in group)
    rows: list[list[str | Cell]] = []
    for name, group in groups.items():
        for signal in signals_of(group):
            shares = [[100 * share for share in record["signals"][signal]["histogram"]] for record in group]
            cells = [_mean((row[at] for row in shares if at < len(row)), "{:.0f}") for at in range(deepest)]
            rows.append([name, signal, *cells])
    header = ["model", "signal", *(_loops(at + 1) for at in range(deepest))]
    return Table("histogram", "Tokens by depth (%), chosen thresholds", header, rows, [], labels=2)


def kind_table(groups: Mapping[str, Sequence[Record]]) -> Table:
    """How deep tokens of each kind go under the chosen residual."""
    rows: list[list[str | Cell]] = []
    for name, group in groups.items():
        for kind in group[0]["kinds"]:
            loops = _mean((r["kinds"][kind]["loops"] for r in group if kind in r["kinds"]), "{:.2f}")
            rows.append([name, kind, loops])
    return Table(
        "kinds", "Depth by kind of token, chosen residual", ["model", "kind", "mean loops"], rows, [], labels=2
    )


def speed_table(groups: Mapping[str, Sequence[Record]]) -> Table:
    """Measured decoding beside what the FLOPs allow."""
    rows: list[list[str | Cell]] = []
    for name, group in groups.items():
        timed = [record for record in group if "speed" in record]
        for batch in timed[0]["speed"] if timed else ():
            speeds = [record["speed"][batch] for record in timed]
            keys = ("full tokens/s", "exits tokens/s", "compact tokens/s")
            cells = [_mean((each[key] for each in speeds), "{:.0f}") for key in keys]
            keys = ("speed-up", "compact speed-up", "loops", "theoretical")
            cells += [_mean((each[key] for each in speeds), "{:.2f}") for key in keys]
            rows.append([name, batch, *cells])
    header = ["model", "batch", "full depth, tokens/s", "exits, tokens/s", "compact, tokens/s"]
    header += ["speed-up", "compact", "mean loops", "theoretical"]
    notes = [
        "Theoretical: FLOPs of a token at full depth over those at the mean depth of the decoded tokens, with the "
        "head. Compact: sequences whose token has left leave the batch too.",
    ]
    return Table("speed", "Decoding, chosen residual", header, rows, notes, labels=2)


def _charts(records: Mapping[str, Record]) -> tuple[list[Group], list[Chart]]:
    """What is switched on and off, which is signals here, and a chart for each model."""
    curves = {
        name: {
            **{signal: row["curve"] for signal, row in record["signals"].items()},
            "every token equally deep": record["static"],
            "oracle": _oracle(record),
            "random": [record["random"]],
        }
        for name, record in records.items()
    }
    names = list(dict.fromkeys(name for each in curves.values() for name in each))
    charts = [
        Chart(
            f"exits {number}",
            name,
            "Every point was run for real; the oracle is the best of several, in a mix of two over windows.",
            "held-out loss, nats per token",
            [Line(names.index(each), "", *frontier(rows), marks=len(rows) == 1) for each, rows in lines.items()],
            x="mean loops of a predicted token",
        )
        for number, (name, lines) in enumerate(curves.items())
    ]
    return [Group(name, style) for name, style in zip(names, styles_of(names), strict=True)], charts


def _oracle(record: Record) -> list[dict[str, float]]:
    """The best of the oracles, or of fixed depths where these are better, in a mix of two."""
    return envelope([*record["oracle"], *record["static"]])


def draw(name: str, record: Record) -> Picture:
    """Quality against mean loops: every signal, the static frontier, random exits and the oracle."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for place, (signal, row) in enumerate(record["signals"].items()):
        style = LINESTYLES[place % len(LINESTYLES)]
        axes.plot(*frontier(row["curve"]), linestyle=style, label=signal, linewidth=1.2)
    axes.plot(*frontier(record["static"]), "o-", color="black", label="every token equally deep")
    axes.plot(*frontier(_oracle(record)), ":", color="gray", label="oracle")
    axes.plot([record["random"]["loops"]], [record["random"]["loss"]], "x", color="black", label="random")
    axes.set(xlabel="mean loops of a predicted token", ylabel="held-out loss", title=name)
    axes.legend(fontsize=7)
    key = "".join(letter if letter.isalnum() else "_" for letter in name)
    return Picture(f"exits_{key}", f"{name}: every point of a signal was run for real.", figure)
