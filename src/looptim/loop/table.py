"""The paper's extended comparison table (Table 7), printed from the code, with the measured gap beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..base.markup import markdown_table
from .describe import describe
from .diagnose import diagnose_maps
from .registry import build, names

COLUMNS = {
    "name": "transition",
    "rule_name": "rule",
    "projection": "o",
    "decay": "λ",
    "step": "η",
    "input_map": "x",
    "objective": "L",
    "verdict": "aligned",
    "gap": "gap",
    "parameters": "parameters",
}


def zoo(width: int = 64, steps: int = 3) -> list[dict[str, Any]]:
    """One row per preset, installed ones too: its description and its diagnosis, measured at its initial values."""
    return [_row(name, width, steps) for name in names()]


def _row(name: str, width: int, steps: int) -> dict[str, Any]:
    loop = build(name, width=width, steps=steps)
    verdict = diagnose_maps(loop)
    measured = {"gap": verdict.gap, "hidden": verdict.hidden, "read": verdict.read}
    return {**dataclasses.asdict(describe(loop)), "steps": steps, **measured}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the strings of `COLUMNS`."""
    gap = f"{row['gap']:.2f}" + ("*" if row["hidden"] else "")
    verdict = "yes" if row["aligned"] else f"no, reads {row['read']}"
    per = f"in {row['steps']} loops" if row["loop_specific"] else "shared"
    shown = {**row, "gap": gap, "verdict": verdict, "parameters": f"{row['parameters']:,} {per}"}
    return [str(shown[key]) for key in COLUMNS]


def narrow(rows: list[dict[str, Any]]) -> str:
    """The table for narrow terminals: two lines per row."""
    lines = []
    for row in rows:
        name, rule, o, lam, eta, x, objective, aligned, gap, parameters = cells(row)
        lines += [f"{name}: {rule}, aligned: {aligned}, gap {gap}, parameters {parameters}"]
        lines += [f"    o = {o},  λ = {lam},  η = {eta},  x = {x},  L = {objective}"]
    return "\n".join(lines)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    return markdown_table(list(COLUMNS.values()), map(cells, rows))


FOOTNOTE = (
    "gap: |Hᵀg − xᵀg| / |Hᵀg|, the gradient's write against the one used, at the initial values; "
    "*: these hide the mismatch, so the gap is that at randomly changed parameters."
)
