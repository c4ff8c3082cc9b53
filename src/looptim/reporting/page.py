"""The page: a table of the runs, what differs in their configs, and their figures; written whole or not at all."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import clean
from ..base.files import os_errors_as, write_together
from ..rundir import Run
from .plots import Picture

ABSENT = "–"

SUMMARY: dict[str, Callable[[Run], str]] = {
    "transition": lambda run: run.preset,
    "steps": lambda run: f"{run.lines[-1]['step']:,}",
    "tokens": lambda run: f"{run.lines[-1]['tokens']:,}",
    "final training loss": lambda run: _number(_end(run.column("loss")[1]), ".4f", np.mean),
    "final validation loss": lambda run: _number(run.column("valid_loss")[1][-1:], ".4f"),
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


def _table(runs: Sequence[Run], rows: Mapping[str, Sequence[str]]) -> str:
    """Quantities down and runs across, so that one run fits a phone and many scroll."""
    cells = {"": [run.name for run in runs], **rows}
    lines = []
    for head, values in cells.items():
        tag, escaped = ("td" if head else "th"), [html.escape(clean(value)) for value in values]
        lines.append(f"<tr><th>{html.escape(head)}</th>{''.join(f'<{tag}>{value}</{tag}>' for value in escaped)}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The keys on which the configs of the runs differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = {key: [str(run.config.get(key, ABSENT)) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


NOTE = """Losses in nats per token; the training loss is a mean over the last 4% of the logged steps.
Training time is tokens over tokens/s, without pauses."""

CSS = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fafafa; --line: #d8d8d8; --soft: #666; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --paper: #161616; --line: #3a3a3a; --soft: #a0a0a0; } }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: normal; color: var(--soft); position: sticky; left: 0;
  background: var(--paper); white-space: normal; padding-left: 0; }
.figures { display: grid; gap: 1.2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; } img { width: 100%; display: block; background: #fff; border-radius: 6px; }
figcaption, .note { color: var(--soft); font-size: .85rem; margin-top: .3rem; }
pre { overflow-x: auto; font-size: .82rem; } summary { cursor: pointer; padding: .3rem 0; }
"""


def run_page(runs: Sequence[Run], pictures: Sequence[Picture], files: Mapping[str, bytes], tables: str) -> str:
    title = html.escape(clean(", ".join(run.name for run in runs)) if len(runs) <= 4 else f"{len(runs)} runs")
    # The first screen is the loss: its figures come first among the pictures.
    parts = [f"<h1>{title}</h1>", embedded(pictures, files), "<h2>In numbers</h2>"]
    parts.append(_table(runs, {head: [cell(run) for run in runs] for head, cell in SUMMARY.items()}))
    parts.append(f'<p class="note">{NOTE}</p>')
    if len(runs) > 1:
        rows = _differences(runs)
        parts += ["<h2>What differs in the configs</h2>", _table(runs, rows) if rows else "<p>Nothing.</p>"]
    parts += [tables, "<h2>Files</h2>"]
    for run in runs:
        for name, text in run.files.items():
            head = html.escape(clean(f"{run.name}/{name}"))
            parts.append(f"<details><summary>{head}</summary><pre>{html.escape(text)}</pre></details>")
    return document(title, parts)


def embedded(pictures: Sequence[Picture], files: Mapping[str, bytes]) -> str:
    """The figures inside of the page, which then is one file."""
    parts = []
    for name, caption, _ in pictures:
        kind, data = ("svg+xml", files[f"{name}.svg"]) if f"{name}.svg" in files else ("png", files[f"{name}.png"])
        source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        parts.append(
            f'<figure><img alt="{name}" src="{source}"><figcaption>{html.escape(caption)}</figcaption></figure>'
        )
    return f'<div class="figures">{"".join(parts)}</div>'


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page; `title` is HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} · looptim report</title><style>{CSS}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def write_report(out: Path, files: Mapping[str, bytes], *, figures: Sequence[str]) -> None:
    """Write the files of a report; of an earlier one, `figures` that are not among them go."""
    with os_errors_as(f"cannot write the report to {out}", "choose another folder"):
        write_together(out, files)
        for name in figures:
            for stale in {f"{name}.png", f"{name}.svg"} - set(files):
                (out / stale).unlink(missing_ok=True)
