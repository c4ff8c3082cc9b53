"""The exponent of loops: a planted one is found, and a grid that cannot tell it is refused."""

import dataclasses

import numpy as np
import pytest
from support import config

from looptim.config import ModelConfig
from looptim.reporting.page import Page
from looptim.rundir import Run
from looptim.studies.measures import Outcome
from looptim.studies.phi import Point, _Problem, bootstrap, fit, interval, is_identified
from looptim.studies.phi_grid import PhiGrid
from looptim.studies.phi_page import (
    PUBLISHED,
    _check_numerics,
    block_parameters,
    measure,
    points_of,
    table,
    with_exponents,
)
from looptim.studies.spec import Cell, Plan, Study

PLANTED = {"plain": 0.4, "better": 0.7}


def planted(noise, *, seed=0, widths=(64, 96, 128, 192), budgets=(1e6, 2e6, 4e6, 8e6), seeds=2, exponents=PLANTED):
    """Runs of a law with known exponents."""
    rng, points = np.random.default_rng(seed), []
    for width in widths:
        for tokens in budgets:
            for loops in (1, 2, 4):
                for name in [None] if loops == 1 else exponents:
                    once, looped = 24 * width**2, 48 * width**2 / loops
                    size = once + loops ** exponents.get(name, 0) * looped
                    loss = 1.5 + 60 * size**-0.3 + 300 * tokens**-0.4
                    drawn = loss * np.exp(noise * rng.standard_normal(seeds))
                    points += [Point(name, loops, once, looped, tokens, float(value)) for value in drawn]
    return points


def test_planted_exponents_are_found_exactly_without_noise():
    found = fit(planted(0.0, seeds=1), restarts=20)
    assert found.phi == pytest.approx(PLANTED, abs=0.01)
    assert found.r2 > 0.99999 > max(found.r2_at.values())


@pytest.mark.long
def test_a_planted_exponent_is_in_its_interval():
    points = planted(0.003)
    fitted = fit(points, restarts=20)
    draws = bootstrap(points, fitted, draws=60)
    for name, value in PLANTED.items():
        low, high = interval(draws[name])
        assert low < value < high and is_identified(draws[name])
    assert (np.array(draws["better"]) > np.array(draws["plain"])).all()


PUBLISHED_ORDER = {"truncated": 0.38, "plain": 0.46, "hyper-connections": 0.65}


def simulated(noise, studies, *, draws=60):
    """Made-up studies of the grid of `phi.toml`: which intervals hold the planted value, their widths, order."""
    held, widths, ordered = [], [], []
    for seed in range(studies):
        points = planted(
            noise,
            seed=seed,
            widths=(32, 64, 96),
            budgets=(131_072, 262_144, 524_288),
            seeds=1,
            exponents=PUBLISHED_ORDER,
        )
        fitted = fit(points, restarts=10)
        ends = [interval(each) for each in bootstrap(points, fitted, draws=draws).values()]
        held.append([low < value < high for (low, high), value in zip(ends, PUBLISHED_ORDER.values(), strict=True)])
        widths.append([high - low for low, high in ends])
        ordered.append(sorted(fitted.phi, key=lambda name: fitted.phi[name]) == list(PUBLISHED_ORDER))
    return np.array(held), np.array(widths), np.array(ordered)


@pytest.mark.slow
def test_intervals_of_many_made_up_studies_hold_the_planted_exponents():
    """With the noise of our studies, 0.4%: `pytest -s -m slow tests/studies/test_phi.py` prints what the page says."""
    studies = 40
    held, widths, ordered = simulated(0.004, studies)
    print(f"{studies} studies: {held.mean():.3f} of the intervals hold, by transition {held.mean(0).round(3)};")
    print(f"median widths {np.median(widths, 0).round(3)}; the order is right in {ordered.mean():.3f}")
    # Intervals of one study are not independent.
    assert held.mean() > 0.95 - 3 * np.sqrt(0.95 * 0.05 / studies)
    assert ordered.mean() > 0.9 and np.median(widths) < 0.25


def test_the_derivatives_are_those_of_the_law():
    problem = _Problem(planted(0.01, seeds=1), list(PLANTED))
    x = np.array([0.4, 3.0, 0.3, 5.0, 0.4, 0.4, 0.7])
    step = 1e-6 * np.eye(len(x))
    numeric = np.stack([(problem.residuals(x + h) - problem.residuals(x - h)) / 2e-6 for h in step], 1)
    assert np.allclose(problem.jacobian(x), numeric, atol=1e-7)


GRID = {
    "layouts": {"1": "4", "2": "1-1x2-1"},
    "budgets": [1, 2],
    "widths": {"narrow": ["model.width=16"], "wide": []},
    "transitions": {"vanilla": {"preset": "vanilla"}},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layouts": {"1": "4", "2": "1-2x2-1"}}, r"unroll to different depths \('4' 4, '1-2x2-1' 6\)"),
        ({"layouts": {"2": "1-1x2-1", "1": "1-2x1-1"}}, "no plain layout for 1 loop"),
        ({"layouts": {"2": "1-1x2-1"}}, "no plain layout for 1 loop, which every transition is measured against"),
        ({"layouts": {"1": "4"}}, "has 1 loop only"),
        ({"budgets": [1]}, "one budget does not tell parameters from tokens; give phi.budgets at least two"),
        ({"widths": {"one": []}}, "one width does not tell parameters from tokens"),
    ],
)
def test_a_grid_that_cannot_tell_is_one_sentence(change, message):
    with pytest.raises(ValueError, match=message) as error:
        PhiGrid(**{**GRID, **change})
    assert "\n" not in str(error.value)


def test_parameters_of_blocks_are_counted_outside_and_inside_the_loop():
    dense = {"dense_layers": 9, "loop": {"preset": "operloop"}}
    once, looped = block_parameters(ModelConfig.tiny(layout="1-3x2-1", **dense))
    assert looped == 3 * once / 2
    assert block_parameters(ModelConfig.tiny(layout="5", dense_layers=9, loop={"preset": "none"})) == (once + looped, 0)


def plan_and_runs(losses):
    """A grid with a finished run of each of its variants."""
    grid = PhiGrid(**GRID)
    study = Study(
        title="t",
        base="b",
        tokens=512,
        seeds=[0],
        reference=grid.members()[0].name,
        matched=False,
        variants=grid.variants(),
        phi=grid,
    )
    cells, found = [], []
    for member, loss in zip(grid.members(), losses, strict=True):
        layout, looped = grid.layouts[member.loops], member.transition is not None
        width = 16 if member.width == "narrow" else 32
        model = {
            "layout": layout,
            "width": width,
            "dense_layers": 9,
            "loop": {"preset": "vanilla" if looped else "none"},
        }
        cells.append(Cell(member.name, 0, config(model=model, steps=int(4 * member.budget))))
        run = Run(member.name, [], {}, {"env.json": '{"looptim": "1", "torch": "2", "data": {}}'})
        found.append(Outcome(member.name, {0: run}, {}, {0: loss}, {}, {}, {}))
    return Plan("phi", study, cells, {}, {}), found


@pytest.mark.long
def test_a_study_becomes_points_a_fit_and_a_table(tmp_path):
    plan, found = plan_and_runs([5.0, 4.5, 4.6, 4.2, 5.2, 4.7, 4.8, 4.4])
    points = points_of(plan, found)
    assert len(points) == 8 and {point.tokens for point in points} == {512, 1024}
    assert [point.transition for point in points] == [None] * 4 + ["vanilla"] * 4
    measured = measure(points, tmp_path / "phi.json", draws=5)
    text = table(plan, measured, found)
    page = with_exponents(Page("t", [], []), plan, measured)
    names = [group.name for group in page.groups]
    assert names[-3:] == [f"{name} (published)" for name in PUBLISHED]
    (figure,) = page.forests
    assert [row["mean"] for row in figure["rows"]] == pytest.approx([*measured["phi"].values(), 0.38, 0.459, 0.65])
    assert (figure["rows"][-2]["low"], figure["rows"][-2]["high"]) == (0.41, 0.53) and figure["rows"][-1]["low"] is None
    assert text.rows[0][0] == "vanilla" and "share 4 runs that are not looped" in text.notes[1]
    assert measure(points[:4], tmp_path / "phi.json") is None
    assert "0 of 8" not in " ".join(text.notes)


def test_runs_of_other_numerics_are_not_fitted_together():
    _, found = plan_and_runs([5.0] * 8)
    same = Run("same", [], {}, {"env.json": '{"numerics": 1, "looptim": "1", "torch": "2"}'})
    found[2] = dataclasses.replace(found[2], runs={0: same})
    # Runs of before there was a number have the first.
    _check_numerics(found)
    other = Run("other", [], {}, {"env.json": '{"looptim": "1", "torch": "3"}'})
    found[3] = dataclasses.replace(found[3], runs={0: other})
    with pytest.raises(
        ValueError, match=r"runs of different numerics .* has numerics 1, looptim 1, torch 2; .* torch 3\); train"
    ):
        _check_numerics(found)
