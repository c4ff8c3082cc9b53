"""The averages of the paper's tables, exactly as its appendix D defines them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .suites import FLEXIBLE, ROWS, Row

LL = tuple(row.name for row in ROWS if row.group == "LL")
EM = tuple(row.name for row in ROWS if row.group == "EM")


def averages(scores: Mapping[str, float | None]) -> dict[str, float | None]:
    """LL Avg., EM Avg. and Overall, from percentages by row; None where a row is missing.

    LL Avg. is the unweighted mean of the six commonsense scores, EM Avg. that of the six math, code and reasoning
    scores, and Overall the mean of the two. The EM average is taken a second time with GSM8K's other filter.

    >>> averages(dict.fromkeys(LL, 60.0) | dict.fromkeys(EM, 20.0))["Overall"]
    40.0
    """
    other = {row.name: scores.get(f"{row.name}_flexible") for row in ROWS if f"{row.name}_flexible" in scores}
    ll, em = mean(scores, LL), mean(scores, EM)
    flexible = mean({**scores, **other}, EM) if other else None
    return {
        "LL Avg.": ll,
        "EM Avg.": em,
        "Overall": overall(ll, em),
        "EM Avg. (flexible)": flexible,
        "Overall (flexible)": overall(ll, flexible),
    }


def mean(scores: Mapping[str, float | None], names: Sequence[str]) -> float | None:
    """The unweighted mean of the named scores, None if one is missing."""
    values = [scores.get(name) for name in names]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def overall(ll: float | None, em: float | None) -> float | None:
    """The mean of the two group averages, weighted equally."""
    return None if ll is None or em is None else (ll + em) / 2


def scores(results: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float | None]]:
    """The value and standard error of every row that has a result; shares as percentages."""
    table = {}
    for row in (*ROWS, *FLEXIBLE):
        found = results.get(row.task, {})
        if isinstance(found.get(row.metric), int | float):
            table[row.name] = _score(row, found)
    return table


def _score(row: Row, found: Mapping[str, Any]) -> tuple[float, float | None]:
    scale = 1.0 if row.lower_is_better else 100.0
    name, _, filter = row.metric.partition(",")
    error = found.get(f"{name}_stderr,{filter}")
    return scale * found[row.metric], scale * error if isinstance(error, int | float) else None
