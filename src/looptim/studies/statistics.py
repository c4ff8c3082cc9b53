"""Statistics over seeds: what a study's runs, one per variant and seed, say about variants."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

LEVEL = 0.95
"""The confidence level of every interval."""
POWER = 0.8
"""The power with which a number of seeds detects a difference."""
MOST_SEEDS = 999
"""The largest number of seeds that is suggested."""

Pair = tuple[str, str]
"""A variant, and the one it is compared with."""


class Estimate(NamedTuple):
    """A mean, the half-width of its 95% interval (None for a single seed), and every seed's value."""

    mean: float
    half: float | None
    values: tuple[float, ...]

    @property
    def is_seen(self) -> bool:
        """Whether the interval excludes zero."""
        return self.half is not None and abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and Student's interval, `t s / sqrt(n)`.

    >>> round(estimate([1.0, 2.0, 3.0]).half, 3)
    2.484
    """
    if not values:
        return None
    data = np.array(values, float)
    if len(data) == 1:
        return Estimate(float(data[0]), None, tuple(values))
    return Estimate(float(data.mean()), student(len(data))[len(data)] * float(data.std(ddof=1)), tuple(values))


def student(most: int) -> dict[int, float]:
    """The factor from a standard deviation over seeds to a half-width, `t / sqrt(n)`, by the number of seeds.

    >>> {n: round(factor, 3) for n, factor in student(3).items()}
    {2: 8.985, 3: 2.484}
    """
    return {n: float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) / n**0.5 for n in range(2, most + 1)}


@final
@dataclasses.dataclass(frozen=True)
class Model:
    """`y = variant + seed + residual` by least squares, over the runs there are.

    The residuals of all variants have one variance: three seeds tell little of a spread, all variants together more.
    """

    table: Mapping[str, Mapping[int, float]]
    """The values by variant and seed."""
    design: NDArray
    """One row per run; one column per variant, then one per seed."""
    inverse: NDArray
    """Of the design: the pseudo-inverse, since a constant may move from the variants to the seeds."""
    effects: NDArray
    residuals: NDArray
    df: int

    @property
    def sd(self) -> float:
        """The residuals' standard deviation; zero without degrees of freedom."""
        return math.sqrt(float(self.residuals @ self.residuals) / self.df) if self.df else 0.0

    @property
    def free(self) -> NDArray:
        """The projection of runs onto their residuals."""
        return np.eye(len(self.design)) - self.design @ self.inverse

    def contrast(self, pair: Pair) -> NDArray | None:
        """The difference of a pair as weights of the effects; None if no seeds connect the two."""
        names = list(self.table)
        weights = np.zeros(self.design.shape[1])
        if any(name not in names for name in pair) or pair[0] == pair[1]:
            return None
        weights[names.index(pair[0])], weights[names.index(pair[1])] = 1.0, -1.0
        return weights if np.allclose(weights @ self.inverse @ self.design, weights) else None


def fit(table: Mapping[str, Mapping[int, float]]) -> Model:
    """The two-way model of a table; variants without a run are left out.

    >>> model = fit({"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 3.2}})
    >>> round(model.sd, 3), model.df
    (0.1, 1)
    """
    table = {name: values for name, values in table.items() if values}
    runs = [(name, seed, value) for name, values in table.items() for seed, value in values.items()]
    seeds = sorted({seed for _, seed, _ in runs})
    design = np.zeros((len(runs), len(table) + len(seeds)))
    for row, (name, seed, _) in zip(design, runs, strict=True):
        row[list(table).index(name)] = row[len(table) + seeds.index(seed)] = 1.0
    y = np.array([value for _, _, value in runs])
    inverse = np.linalg.pinv(design)
    effects = inverse @ y
    df = len(runs) - int(np.linalg.matrix_rank(design)) if runs else 0
    return Model(table, design, inverse, effects, y - design @ effects, df)


def differences(model: Model, pairs: Sequence[Pair]) -> dict[Pair, Estimate | None]:
    """The difference of every pair, with intervals that hold simultaneously with 95% confidence.

    `|difference - truth| <= c s sqrt(w)`, w the variance of the difference in units of the residual's and c the 95%
    quantile of the largest of the pairs' |t|. For all against one, over the same seeds, that is Dunnett's procedure (J.
    Amer. Statist. Assoc. 50, 1955) with the residual of the two-way model; for all pairs it is Tukey's.
    """
    contrasts = {pair: model.contrast(pair) for pair in pairs}
    known = {pair: weights for pair, weights in contrasts.items() if weights is not None}
    if not known:
        return dict.fromkeys(pairs)
    weights = np.stack(list(known.values()))
    covariance = weights @ model.inverse @ model.inverse.T @ weights.T
    scale = np.sqrt(np.diag(covariance))
    halves: list[float | None] = [None] * len(known)
    if model.df:
        halves = (critical(covariance / np.outer(scale, scale), model.df) * model.sd * scale).tolist()
    found: dict[Pair, Estimate | None] = dict.fromkeys(pairs)
    for pair, mean, half in zip(known, weights @ model.effects, halves, strict=True):
        ours, theirs = (model.table[name] for name in pair)
        found[pair] = Estimate(float(mean), half, tuple(ours[seed] - theirs[seed] for seed in ours if seed in theirs))
    return found


def critical(correlation: NDArray, df: int) -> float:
    """The 95% quantile of `max |t_i|`, for t of this correlation and a common residual with `df` degrees of freedom.

    Normals are drawn by Sobol's sequence, the residual is integrated out: to 0.1% of the quantile, always the same. A
    correlation may be singular, as that of all pairs is, which `scipy.stats.multivariate_t` does not integrate.

    >>> round(critical(np.eye(1), 2), 2)
    4.3
    """
    values, vectors = np.linalg.eigh(correlation)
    root = (vectors * np.sqrt(values.clip(0)))[:, values > 1e-9]
    points = stats.qmc.Sobol(root.shape[1], rng=0).random_base2(15)
    largest = np.abs(stats.norm.ppf(points) @ root.T).max(1)

    def excess(quantile: float) -> float:
        # The residual variance relative to its mean must be at least the square of largest / quantile.
        return float(stats.chi2.sf(df * (largest / quantile) ** 2, df).mean()) - LEVEL

    most = stats.t.isf((1 - LEVEL) / 2 / len(correlation), df)
    return optimize.root_scalar(excess, bracket=(0.5, 2 * most), xtol=1e-4).root


class Check(NamedTuple):
    """How well the model's assumptions hold; small p values speak against them."""

    spread: float
    """p of Cochran's test: the largest share of one variant in the spread, against what equal variances give."""
    noticed: float
    """How often that test, at 5%, notices one variant whose residuals are three times as large."""
    additivity: float
    """p of Tukey's test of one degree of freedom: whether variants differ more on some seeds than on others."""

    @property
    def is_doubtful(self) -> bool:
        """Whether either test rejects the model at 5%."""
        return min(self.spread, self.additivity) < 1 - LEVEL


def check(model: Model, *, draws: int = 10_000) -> Check | None:
    """Test the assumptions of the model; None with two variants, whose residuals mirror each other, or too few runs.

    The null distribution of Cochran's share is drawn for the very design, since residuals are not independent.
    Tukey's `F = q / ((S - q) / (df - 1))` has q, the part of S = sum r^2 along the product of the two effects.
    """
    number = len(model.table)
    if number < 3 or model.df < 2 or model.sd == 0:
        return None
    free, variant = model.free, model.design[:, :number]

    def share(residuals: NDArray) -> NDArray:
        spreads = residuals**2 @ variant / (np.diag(free) @ variant).clip(1e-9)
        return spreads.max(-1) / spreads.sum(-1)

    noise = np.random.default_rng(0).standard_normal((draws, len(free)))
    null = share(noise @ free)
    wide = share((noise * (1 + 2 * variant[:, 0])) @ free)
    product = free @ ((variant @ model.effects[:number]) * (model.design[:, number:] @ model.effects[number:]))
    along = float(model.residuals @ product) ** 2 / float(product @ product)
    left = model.df * model.sd**2 - along
    return Check(
        spread=float((1 + (null >= share(model.residuals)).sum()) / (1 + draws)),
        noticed=float((wide > np.quantile(null, LEVEL)).mean()),
        additivity=float(stats.f.sf(along * (model.df - 1) / left, 1, model.df - 1)),
    )


def seeds_needed(difference: float, model: Model, comparisons: int) -> int | None:
    """Seeds with which a study like this sees a difference with power 0.8; None where more than `MOST_SEEDS` are.

    The square of t is a noncentral F with `n difference^2 / (2 sd^2)`. The level is divided by the comparisons
    (Bonferroni), which asks for a little more than the intervals of `differences`; the residual's sd is an estimate.
    """
    if model.sd == 0:
        return None

    def is_enough(seeds: int) -> bool:
        df = (len(model.table) - 1) * (seeds - 1)
        quantile = stats.t.isf((1 - LEVEL) / 2 / comparisons, df)
        return bool(stats.ncf.sf(quantile**2, 1, df, seeds / 2 * (difference / model.sd) ** 2) >= POWER)

    choices = range(2, MOST_SEEDS + 1)
    place = bisect.bisect_left(choices, True, key=is_enough)
    return choices[place] if place < len(choices) else None
