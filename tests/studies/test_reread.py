"""Committed results read again: pages are what the commands make, and their numbers are a textbook's."""

import json
import math
import shutil

import numpy as np
import pytest
from scipy import stats
from support import REPO

import looptim as lo
from looptim.reporting.tables import Cell
from looptim.studies.reread import forest, main, reread

RESULTS = REPO / "docs" / "results"


@pytest.mark.long
def test_the_committed_page_is_what_the_command_makes():
    assert (RESULTS / "reread.md").read_text() == main([str(RESULTS)])


def test_a_study_is_read_by_the_two_way_model():
    rows = json.loads((RESULTS / "roadmap_long" / "results.json").read_text())["variants"]
    y = np.array([row["loss"]["values"] for row in rows.values()])
    residuals = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    sd = math.sqrt((residuals**2).sum() / 8)
    table = reread(RESULTS / "roadmap_long")
    assert table is not None and "8 df" in table.notes[0]
    for row, values in zip(table.rows, y[1:], strict=True):
        difference, own, verdict = row[3], row[4], row[5]
        assert isinstance(difference, Cell) and isinstance(own, Cell)
        assert difference.value == pytest.approx((values - y[0]).mean())
        # Dunnett's table, two-sided, four treatments and a control, 8 degrees of freedom: 3.02.
        assert difference.error == pytest.approx(3.02 * sd * math.sqrt(2 / 3), rel=2e-3)
        assert own.value == pytest.approx(stats.t.ppf(0.975, 2) * stats.sem(values - y[0]))
        assert verdict == ("cannot tell, fell" if row[0] == "heavy ball − operloop" else "cannot tell")


def test_one_seed_or_one_variant_tells_nothing():
    assert reread(RESULTS / "sweep") is None
    assert reread(RESULTS / "unit_long") is None


def test_the_figure_has_the_intervals_of_the_tables():
    table = reread(RESULTS / "novels_long")
    assert table is not None
    axes = forest([RESULTS / "novels_long", RESULTS / "roadmap_long"]).figure.axes
    # Roadmap's reference is OperLoop.
    assert [each.get_title() for each in axes if each.get_visible()] == ["novels_long, 5.1 M tokens"]
    for row, drawn in zip(table.rows, axes[0].containers, strict=True):
        ((low, place), (high, _)) = drawn.lines[2][0].get_segments()[0]
        assert axes[0].get_yticklabels()[int(place)].get_text() == row[0].split(" ")[0]
        assert ((low + high) / 2, (high - low) / 2) == pytest.approx((row[3].value, row[3].error))


@pytest.mark.long
def test_the_committed_archive_makes_the_committed_table(tmp_path):
    shutil.copytree(RESULTS / "deref_short", tmp_path / "again")
    (tmp_path / "again" / "results.md").unlink()
    lo.study("deref", tmp_path / "again", scale="short", only="vanilla x[124]", jobs=0, progress=False)
    made, committed = ((place / "results.md").read_text() for place in (tmp_path / "again", RESULTS / "deref_short"))
    assert made == committed


def test_the_page_of_results_says_which_runs_are_there():
    archived = {file.parent.name for file in RESULTS.glob("*/runs.zip")}
    page = (REPO / "docs" / "results.md").read_text()
    (line,) = [part for part in page.split("\n\n") if part.startswith("**What can be made again.**")]
    assert all(f"`{name}`" in line for name in archived), archived
    others = {file.parent.name for file in RESULTS.glob("*/results.json")} - archived
    assert not [name for name in others if f"`{name}`" in line] and f"the other {len(others)} " in line
