"""The recurrence-equivalence exponent of a transition: what a loop is worth in parameters (arXiv 2604.21106).

    L = E + A (N_once + r^phi N_rec)^-alpha + B D^-beta

N_once and N_rec are the parameters of distinct blocks outside and inside the loop, r the number of loops, D the tokens.
At phi = 0 looping is worth nothing, at phi = 1 a loop is worth as much as blocks of its own. Unrolled depth is the same
for all r, so that r loops have 1/r of the parameters. E, A, alpha, B and beta are common to all transitions, which
share their runs with r = 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

DELTA = 1e-3
"""The error of log L beyond which Huber's loss is linear."""
LOWEST, HIGHEST = -2.0, 3.0
"""Bounds of phi; an interval that reaches them is useless."""
NAMES = ("log E", "log A", "alpha", "log B", "beta")


class Point(NamedTuple):
    """A run."""

    transition: str | None
    """The transition; None at r = 1, which all transitions share."""
    loops: int
    once: float
    looped: float
    tokens: float
    loss: float


@final
@dataclasses.dataclass(frozen=True)
class Fit:
    """The law that fits all points best."""

    law: dict[str, float]
    """Of `NAMES`."""
    phi: dict[str, float]
    r2: float
    """The R^2 of log L."""
    r2_at: dict[str, float]
    """The R^2 with phi fixed at 0 or at 1 for all transitions."""


@final
class _Problem:
    """Residuals of log L and their derivatives, for points given as arrays."""

    def __init__(self, points: Sequence[Point], transitions: Sequence[str]):
        self.log_r = np.log([point.loops for point in points])
        self.once = np.array([point.once for point in points])
        self.looped = np.array([point.looped for point in points])
        self.log_d = np.log([point.tokens for point in points])
        self.y = np.log([point.loss for point in points])
        self.which = np.array([[point.transition == name for name in transitions] for point in points], float)

    def terms(self, x: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        """log L, the share of each of its three terms, and the parameters that loops are worth."""
        growth = np.exp(self.log_r * (self.which @ x[5:]))
        size = self.once + growth * self.looped
        logs = np.stack([np.full_like(self.y, x[0]), x[1] - x[2] * np.log(size), x[3] - x[4] * self.log_d])
        total = np.logaddexp.reduce(logs, 0)
        return total, np.exp(logs - total), size

    def residuals(self, x: NDArray) -> NDArray:
        return self.terms(x)[0] - self.y

    def jacobian(self, x: NDArray) -> NDArray:
        _, (floor, model, data), size = self.terms(x)
        worth = -model * x[2] * (size - self.once) / size * self.log_r
        common = np.stack([floor, model, -model * np.log(size), data, -data * self.log_d], 1)
        return np.concatenate([common, worth[:, None] * self.which], 1)

    def solve(self, start: NDArray, phi: float | None = None) -> optimize.OptimizeResult:
        low = np.array([-5.0, -5.0, 0.01, -5.0, 0.01, *[LOWEST if phi is None else phi - 1e-9] * (len(start) - 5)])
        high = np.array([2.0, 20.0, 2.0, 20.0, 2.0, *[HIGHEST if phi is None else phi + 1e-9] * (len(start) - 5)])
        return optimize.least_squares(
            self.residuals,
            start.clip(low, high),
            jac=self.jacobian,  # pyright: ignore[reportArgumentType]
            bounds=(low, high),
            loss="huber",
            f_scale=DELTA,
            max_nfev=200,
            x_scale=np.array([1.0, 3.0, 0.3, 3.0, 0.3, *[1.0] * (len(start) - 5)]),
        )

    def r2(self, x: NDArray) -> float:
        return float(1 - (self.residuals(x) ** 2).sum() / ((self.y - self.y.mean()) ** 2).sum())


def fit(points: Sequence[Point], *, restarts: int = 100, seed: int = 0) -> Fit:
    """The law and every transition's phi, by Huber's loss on log L, as the best of many starts."""
    transitions = _transitions(points)
    problem, rng = _Problem(points, transitions), np.random.default_rng(seed)

    def best(phi: float | None, number: int) -> NDArray:
        starts = [_start(problem, len(transitions), rng) for _ in range(number)]
        return min((problem.solve(start, phi) for start in starts), key=lambda found: found.cost).x

    x = best(None, restarts)
    held = {name: problem.r2(best(phi, max(1, restarts // 5))) for name, phi in (("0", 0.0), ("1", 1.0))}
    return Fit(
        dict(zip(NAMES, x[:5].tolist(), strict=True)),
        dict(zip(transitions, x[5:].tolist(), strict=True)),
        problem.r2(x),
        held,
    )


def _start(problem: _Problem, transitions: int, rng: np.random.Generator) -> NDArray:
    """A law whose three terms contribute equally to the mean loss, with random exponents."""
    alpha, beta = rng.uniform(0.1, 0.8, 2)
    shares = np.log(rng.dirichlet([2.0, 1.0, 1.0])) + problem.y.mean()
    size, tokens = np.log(problem.once + problem.looped).mean(), problem.log_d.mean()
    law = [shares[0], shares[1] + alpha * size, alpha, shares[2] + beta * tokens, beta]
    return np.array([*law, *rng.uniform(0.0, 1.0, transitions)])


def bootstrap(points: Sequence[Point], fitted: Fit, *, draws: int = 200, seed: int = 0) -> dict[str, list[float]]:
    """Bootstrap draws of every transition's phi, over blocks of runs with equal budgets and numbers of loops.

    A block contains the runs of all transitions, so the draws of two transitions are paired.
    """
    transitions, rng = _transitions(points), np.random.default_rng(seed)
    blocks: dict[tuple[float, int], list[Point]] = {}
    for point in points:
        blocks.setdefault((point.tokens, point.loops), []).append(point)
    known = list(blocks.values())
    x = np.array([*fitted.law.values(), *(fitted.phi[name] for name in transitions)])
    found: dict[str, list[float]] = {name: [] for name in transitions}
    while len(found[transitions[0]]) < draws:
        drawn = [known[place] for place in rng.integers(len(known), size=len(known))]
        sample = [point for block in drawn for point in block]
        if len({point.loops for point in sample}) < 2 or len({point.tokens for point in sample}) < 2:
            # Such a draw tells nothing about loops, or about tokens.
            continue
        problem = _Problem(sample, transitions)
        starts = [x, *(_start(problem, len(transitions), rng) for _ in range(3))]
        best = min((problem.solve(start) for start in starts), key=lambda result: result.cost).x
        for name, value in zip(transitions, best[5:], strict=True):
            found[name].append(round(float(value), 4))
    return found


def interval(draws: Sequence[float]) -> tuple[float, float]:
    """The middle 95% of the draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def is_identified(draws: Sequence[float]) -> bool:
    """Whether the interval is narrower than the range from 0 (a loop is worth nothing) to 1 (everything)."""
    low, high = interval(draws)
    return high - low < 1


def _transitions(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.transition for point in points if point.transition is not None))


def as_json(fitted: Fit, draws: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Every number of the table, and the draws."""
    return {**dataclasses.asdict(fitted), "draws": {name: list(values) for name, values in draws.items()}}
