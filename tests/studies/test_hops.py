"""Chained assignments: tables and the figure of runs that are made up."""

import pytest

from looptim.data.graded import Deref
from looptim.reporting.tables import csv_text
from looptim.rundir import Run
from looptim.studies.hops import _updates_to_solve, hop_heats, hop_pictures, hop_tables
from looptim.studies.measures import Outcome
from looptim.studies.spec import load_plan


def runs_of(variant, shares, **more):
    lines = [
        {"step": step, "tokens": step, "valid_accuracy": [1.0, 0.5 + step / 1000, 0.4]} for step in (100, 400, 500)
    ]
    return Outcome(variant, {0: Run("r", lines, {}, {})}, {}, {0: 1.0}, {}, {0: 0.5}, {0: {**shares, **more}})


def test_a_run_has_solved_its_task_at_the_first_validation_that_says_so():
    run = runs_of("vanilla x1", {}).runs[0]
    assert _updates_to_solve(run, 1, Deref({})) == 400 and _updates_to_solve(run, 2, Deref({"hops": 3})) == float("inf")


@pytest.mark.long
def test_tables_have_the_hops_the_shortcuts_and_the_loops_at_test_time():
    plan = load_plan("deref", scale="smoke", set=["data.options.hops=3", "data.options.chains=2", "train.seq_len=6"])
    found = [runs_of("vanilla x1", {"1": [1.0, 0.95, 0.5]}, **{"2": [1.0, 1.0, 0.97]})]
    found += [runs_of("operloop x2", {"2": [1.0, 0.5, 0.97]})]
    by_hops, by_loops = hop_tables(plan, found)
    assert "100" in csv_text([by_hops, by_loops])
    assert [cell.value for cell in by_hops.rows[0][1:6]] == pytest.approx([2.45, 100, 95, 50, 400])
    assert [row[0] for row in by_hops.rows] == [
        "vanilla x1",
        "operloop x2",
        "*guess among the values seen*",
        "*latest value*",
    ]
    assert by_hops.rows[3][2].value == 100 and by_hops.rows[1][-1].value is None
    assert by_loops.header[1:] == ["1", "2"] and [cell.value for cell in by_loops.rows[0][1:]] == [1, 2]
    assert len(by_loops.rows) == 1
    (picture,) = hop_pictures(plan, found)
    assert [axes.get_title() for axes in picture.figure.axes[:2]] == ["vanilla", "operloop"]
    (heat,) = hop_heats(plan, found)
    assert heat["columns"] == ["0", "1", "2"]
    assert heat["rows"] == [
        {"group": 0, "values": [1.0, 0.95, 0.5], "borders": [2, 2]},
        {"group": 1, "values": [1.0, 0.5, 0.97], "borders": [3, 4]},
    ]
    assert hop_pictures(plan, []) == [] and hop_heats(plan, []) == []
    assert hop_tables(plan, []) == []
