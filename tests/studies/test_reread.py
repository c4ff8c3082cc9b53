"""Committed results read again: the page is what the command makes, and its numbers are a textbook's."""

import json
import math

import numpy as np
import pytest
from scipy import stats
from support import REPO

from looptim.reporting.tables import Cell
from looptim.studies.reread import main, reread

RESULTS = REPO / "docs" / "results"


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
