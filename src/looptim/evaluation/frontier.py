"""Losses over mean loops: what lies between fixed depth and an oracle, and bounds on what a threshold loses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats


def upper_bound(differences: np.ndarray, confidence: float) -> float:
    """An upper bound of the mean at this confidence, by Student's t over windows.

    >>> round(upper_bound(np.array([0.0, 1.0, 0.0, 1.0]), 0.95), 3)
    1.179
    """
    error = differences.std(ddof=1) / math.sqrt(len(differences))
    return float(differences.mean() + stats.t.ppf(confidence, len(differences) - 1) * error)


def compare(record: dict[str, Any]) -> None:
    """Each signal's share of the area between the static frontier and the best oracle, over mean loops.

    Fixed depth and oracle are taken at their best: of two of their policies each window may have either. A share of a
    small area may be any number; how many nats a signal lies above fixed depth, in the mean, is known beside it.
    """
    places = np.linspace(1.25, record["static"][-1]["loops"] - 0.25, 13)
    static = mixed(record["static"], places)
    gap = static - mixed([*record["oracle"], *record["static"]], places)
    usable = gap.mean() > 1e-3
    for row in record["signals"].values():
        ends = [record["static"][0], record["static"][-1]]
        curve = frontier([*row["curve"], *ends])
        below = static - np.interp(places, *curve)
        row["gap closed"] = float(below.sum() / gap.sum()) if usable else None
        row["above fixed"] = -float(below.mean())


def frontier(points: Sequence[Mapping[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean loops and losses, by mean loops.

    >>> frontier([{"loops": 2.0, "loss": 1.0}, {"loops": 1.0, "loss": 3.0}])
    (array([1., 2.]), array([3., 1.]))
    """
    ordered = sorted(points, key=lambda point: point["loops"])
    return np.array([p["loops"] for p in ordered]), np.array([p["loss"] for p in ordered])


def mixed(points: Sequence[dict[str, float]], places: np.ndarray) -> np.ndarray:
    """The least loss at each mean of loops where every window may have either of two of the policies.

    >>> policies = [{"loops": 1.0, "loss": 3.0}, {"loops": 2.0, "loss": 2.5}, {"loops": 3.0, "loss": 1.0}]
    >>> mixed(policies, np.array([1.0, 2.0, 2.5]))
    array([3. , 2. , 1.5])
    """
    loops, losses = frontier(points)
    first, second = (index.flatten() for index in np.indices((len(loops), len(loops))))
    width = np.maximum(loops[second] - loops[first], 1e-9)
    shares = (places[:, None] - loops[first]) / width
    between = losses[first] + shares.clip(0, 1) * (losses[second] - losses[first])
    return np.where((shares >= 0) & (shares <= 1), between, np.inf).min(1)


def envelope(points: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The least loss at each mean of loops where every window may have either of two of the policies, as points.

    >>> [point["loss"] for point in envelope([{"loops": 1.0, "loss": 3.0}, {"loops": 2.0, "loss": 1.0}])][::30]
    [3.0, 2.0, 1.0]
    """
    places = np.linspace(min(point["loops"] for point in points), max(point["loops"] for point in points), 61)
    losses = mixed([dict(point) for point in points], places)
    return [{"loops": float(x), "loss": float(y)} for x, y in zip(places, losses, strict=True)]
