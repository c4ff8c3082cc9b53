"""Intervals, checks and numbers of seeds: against closed forms, against scipy, and by simulation."""

import json
import math
import statistics

import numpy as np
import pytest
from scipy import stats
from support import REPO

from looptim.studies.statistics import check, critical, differences, estimate, fit, seeds_needed

SEEDS = 3


def table(y):
    """By variant and seed, of an array (variants, seeds)."""
    return {f"v{i}": dict(enumerate(row.tolist())) for i, row in enumerate(y)}


def to_first(number):
    return [(f"v{i}", "v0") for i in range(1, number)]


def equicorrelated(number, correlation=0.5):
    return np.full((number, number), correlation) + (1 - correlation) * np.eye(number)


def committed(folder, key):
    """The runs of a committed study as an array (variants, seeds), and its residual sd in closed form."""
    rows = json.loads((REPO / "docs" / "results" / folder / "results.json").read_text())["variants"].values()
    y = np.array([row[key]["values"] for row in rows])
    residuals = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    return y, math.sqrt((residuals**2).sum() / ((y.shape[0] - 1) * (y.shape[1] - 1)))


def test_estimates():
    assert estimate([]) is None
    one = estimate([3.0])
    assert one is not None and one.half is None and not one.is_seen
    values = [1.0, 4.0, 2.5, 3.0]
    low, high = stats.t.interval(0.95, 3, loc=statistics.mean(values), scale=stats.sem(values))
    found = estimate(values)
    assert found is not None and found.half is not None
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))
    assert found.is_seen == (low > 0)


def test_a_whole_grid_is_the_textbooks_two_way_analysis():
    y, sd = committed("novels_long", "loss")
    model = fit(table(y))
    assert (model.df, model.sd) == (8, pytest.approx(sd))
    # Dunnett's table, two-sided, four treatments and a control, 8 degrees of freedom: 3.02.
    half = 3.02 * sd * math.sqrt(2 / SEEDS)
    for (name, _), found in differences(model, to_first(5)).items():
        assert found is not None
        assert found.mean == pytest.approx((y[int(name[1:])] - y[0]).mean())
        assert found.values == pytest.approx(tuple(y[int(name[1:])] - y[0]))
        assert found.half == pytest.approx(half, rel=2e-3)


@pytest.mark.parametrize(("number", "df"), [(1, 2), (4, 8), (8, 16), (11, 22)])
def test_the_quantile_is_that_of_the_multivariate_t(number, df):
    quantile = critical(equicorrelated(number), df)
    inside = stats.multivariate_t.cdf(
        np.full(number, quantile),
        shape=equicorrelated(number),
        df=df,
        lower_limit=np.full(number, -quantile),
        random_state=1,
        maxpts=20_000 * number,
    )
    assert inside == pytest.approx(0.95, abs=5e-4)


def test_all_pairs_are_tukeys():
    number, df = 5, 8
    pairs = [(i, j) for i in range(number) for j in range(i)]
    weights = np.array([[(k == i) - (k == j) for k in range(number)] for i, j in pairs], float)
    tukey = stats.studentized_range.ppf(0.95, number, df) / math.sqrt(2)
    assert critical(weights @ weights.T / 2, df) == pytest.approx(tukey, rel=1e-3)


def test_missing_runs_are_least_squares():
    y = {"a": {0: 1.0, 1: 2.0, 2: 3.5}, "b": {0: 1.5, 2: 3.0}, "c": {1: 2.9, 2: 4.0}, "none": {}}
    # Columns: a constant, b, c, seed 1, seed 2.
    design = [[1, 0, 0, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 0, 1], [1, 1, 0, 0, 0], [1, 1, 0, 0, 1]]
    design = np.array([*design, [1, 0, 1, 1, 0], [1, 0, 1, 0, 1]], float)
    values = np.array([1.0, 2.0, 3.5, 1.5, 3.0, 2.9, 4.0])
    effects, (squares,), *_ = np.linalg.lstsq(design, values)
    model = fit(y)
    assert (model.df, model.sd) == (2, pytest.approx(math.sqrt(squares / 2)))
    found = differences(model, [("b", "a"), ("c", "a"), ("none", "a"), ("a", "a")])
    assert found["none", "a"] is None and found["a", "a"] is None
    covariance = np.linalg.inv(design.T @ design)[1:3, 1:3]
    scale = np.sqrt(np.diag(covariance))
    quantile = critical(covariance / np.outer(scale, scale), 2)
    for index, name in enumerate(("b", "c")):
        value = found[name, "a"]
        assert value is not None
        assert value.mean == pytest.approx(effects[1 + index])
        assert value.half == pytest.approx(quantile * model.sd * scale[index], rel=1e-6)
    assert found["b", "a"].values == (0.5, -0.5)


def test_what_cannot_be_told_is_not():
    apart = fit({"a": {0: 1.0, 1: 2.0}, "b": {2: 1.0, 3: 1.0}})
    assert differences(apart, [("b", "a")]) == {("b", "a"): None}
    one = differences(fit({"a": {0: 1.0}, "b": {0: 3.0}}), [("b", "a")])["b", "a"]
    assert one is not None and one.mean == pytest.approx(2.0) and one[1:] == (None, (2.0,))
    assert differences(fit({}), []) == {}
    assert check(fit({"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 5.0}})) is None
    assert seeds_needed(0.1, fit({"a": {0: 1.0}, "b": {0: 3.0}}), 1) is None


@pytest.mark.parametrize("key", ["loss", "training_loss"])
def test_the_intervals_cover_at_their_nominal_rate_for_the_committed_noise(key):
    """All four intervals of the main comparison at once, in 95 of 100 studies with its residual and its seeds."""
    y, sd = committed("novels_long", key)
    number, draws = len(y), 50_000
    random = np.random.default_rng(0)
    truth, spread = y.mean(1), math.sqrt(max(0.0, y.mean(0).var(ddof=1) - sd**2 / number))
    seeds = random.normal(0, spread, (draws, 1, SEEDS))
    drawn = truth[:, None] + seeds + random.normal(0, sd, (draws, number, SEEDS))
    model = fit(table(y))
    quantile = critical(equicorrelated(number - 1), model.df)
    residuals = drawn.reshape(draws, -1) @ model.free
    halves = quantile * np.sqrt((residuals**2).sum(1) / model.df) * math.sqrt(2 / SEEDS)
    means = drawn.mean(2)
    # What is done here for all studies at once is what is done for one.
    for place in (0, 1):
        found = differences(fit(table(drawn[place])), to_first(number)).values()
        assert [value.half for value in found if value] == pytest.approx([halves[place]] * (number - 1), rel=1e-3)
        assert [value.mean for value in found if value] == pytest.approx(means[place, 1:] - means[place, 0])
    missed = np.abs(means[:, 1:] - means[:, :1] - (truth[1:] - truth[0])) > halves[:, None]
    assert 1 - missed.any(1).mean() == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / draws))
    # Student's intervals, of each pair's own three numbers, hold for one pair, not for four.
    pairs = drawn[:, 1:] - drawn[:, :1]
    own = stats.t.ppf(0.975, SEEDS - 1) * pairs.std(2, ddof=1) / math.sqrt(SEEDS)
    assert (np.abs(pairs.mean(2) - (truth[1:] - truth[0])) > own).any(1).mean() > 0.12


def test_checks_are_calm_where_the_model_holds_and_notice_where_it_does_not():
    random = np.random.default_rng(1)
    plain = [check(fit(table(random.normal(size=(5, 3)))), draws=500) for _ in range(300)]
    for p in zip(*((found.spread, found.additivity) for found in plain if found), strict=True):
        assert np.mean(np.array(p) < 0.05) == pytest.approx(0.05, abs=3.5 * math.sqrt(0.05 * 0.95 / 300))
    y = random.normal(size=(5, 3))
    y[2] *= 30
    wide = check(fit(table(y)))
    assert wide is not None and wide.spread < 0.05 and wide.is_doubtful
    # Three seeds are few: a spread three times the others' is missed in most studies.
    assert 0.2 < wide.noticed < 0.4
    a, b = np.array([0.0, 1.0, 2.0, 4.0]), np.array([0.0, 1.0, 3.0])
    product = check(fit(table(np.outer(1 + a, 1 + b) + 0.01 * random.normal(size=(4, 3)))))
    assert product is not None and product.additivity < 1e-3


def test_additivity_is_tukeys_closed_form():
    y, _ = committed("novels", "loss")
    rows, columns = y.mean(1) - y.mean(), y.mean(0) - y.mean()
    residuals = y - rows[:, None] - columns - y.mean()
    along = (rows @ y @ columns) ** 2 / ((rows**2).sum() * (columns**2).sum())
    ratio = along / (((residuals**2).sum() - along) / 7)
    found = check(fit(table(y)))
    assert found is not None and found.additivity == pytest.approx(stats.f.sf(ratio, 1, 7))


def test_the_number_of_seeds_has_the_power_it_promises():
    y, sd = committed("novels_long", "loss")
    seeds = seeds_needed(0.01, fit(table(y)), 4)
    assert seeds is not None

    def power(number):
        random = np.random.default_rng(number)
        df = 4 * (number - 1)
        noise = sd * np.sqrt(random.chisquare(df, 100_000) / df)
        t = random.normal(0.01, sd * math.sqrt(2 / number), 100_000) / (noise * math.sqrt(2 / number))
        return np.mean(np.abs(t) > stats.t.isf(0.025 / 4, df))

    assert power(seeds) > 0.795 and power(seeds - 1) < 0.805
    assert seeds_needed(1e-6, fit(table(y)), 4) is None
    assert seeds_needed(10.0, fit(table(y)), 4) == 2
