"""Studies of exits: tables, verdicts and the figure of records that are made up."""

import pytest

from looptim.reporting.tables import csv_text
from looptim.studies.exits import (
    ABOVE,
    FIXED,
    GAP,
    LOOPS,
    OURS,
    PATIENT,
    POOLED,
    against,
    exit_pictures,
    exit_tables,
    shares,
    verdict,
)
from looptim.studies.measures import Outcome
from looptim.studies.spec import load_plan


def record(shares, kl_loops=2.0):
    static = [{"loops": float(loops), "loss": 4.0 - loops} for loops in (1, 2, 3)]
    signals = {
        name: {
            "gap closed": share,
            "above fixed": None if share is None else 1 - share,
            "curve": [{"loops": 1.5, "loss": 2.0}, {"loops": 2.5, "loss": 1.2}],
            "chosen": {"loops": kl_loops, "loss": 1.1, "more loss": 0.1, "threshold": 0.5},
        }
        for name, share in shares.items()
    }
    return {
        "settings": {"risk": 0.01, "confidence": 0.95, "windows": 64},
        "signals": signals,
        "static": static,
        "oracle": [{"loops": 1.2, "loss": 1.0}],
        "random": {"loops": 2.0, "loss": 2.5},
        "fixed": {"loops": 1.75, "loss": 1.1, "more loss": 0.1},
        "kinds": {"word": {"loops": 2.0, "tokens": 3}},
    }


def outcome(variant, rows):
    exits = {seed: record(row) for seed, row in enumerate(rows)}
    return Outcome(variant, {}, {}, {}, {}, {}, {}, exits)


def made_up():
    """KL is better by 0.3 within every run, whatever the run; entropy is about as good."""
    names = (OURS, "kl", "entropy")
    base = {"vanilla": (0.1, 0.5, 0.2), "operloop": (0.3, 0.1, 0.4)}
    noise = (0.01, -0.02, 0.015, 0.03, -0.01, 0.0)
    found, place = [], 0
    for variant, levels in base.items():
        rows = []
        for level in levels:
            rows.append(dict(zip(names, (level, level + 0.3 + noise[place], level - noise[place]), strict=True)))
            place += 1
        found.append(outcome(variant, rows))
    return found


def test_signals_are_compared_within_runs():
    found = made_up()
    records = {each.variant: each.exits for each in found}
    assert shares(records, GAP, OURS)["operloop"] == {0: 0.3, 1: 0.1, 2: 0.4}
    compared = against(records, GAP)
    assert compared["kl"][POOLED].mean == pytest.approx(-0.3042, abs=1e-4)
    assert verdict(compared["kl"][POOLED]) == "worse" and verdict(compared["entropy"][POOLED]) == "cannot tell"
    assert all(verdict(compared["kl"][variant]) == "worse" for variant in records)
    # Runs differ by far more than signals do within them, which an interval of means alone would drown in.
    assert compared["kl"][POOLED].half < 0.05
    # More loss is worse where more of a gap is better, and the verdict is the same.
    nats = against(records, ABOVE)["kl"][POOLED]
    assert nats.mean == pytest.approx(0.3042, abs=1e-4) and verdict(nats, more_is_better=False) == "worse"
    assert FIXED not in compared and against(records, LOOPS)[FIXED][POOLED].mean == pytest.approx(0.25)


def test_a_gap_that_is_none_is_left_out():
    rows = [{OURS: 0.2, "kl": None}, {OURS: 0.3, "kl": 0.4}]
    tables = exit_tables([outcome("vanilla", rows)])
    assert tables[0].rows[0][-1].value == 0.4 and tables[0].rows[0][-1].error is None


def test_a_run_of_before_has_no_fixed_depth():
    found = made_up()
    for each in found:
        for known in each.exits.values():
            del known["fixed"]
    chosen = exit_tables(found)[5]
    assert chosen.rows[0][2].value is None and chosen.rows[0][3].value == 2.0


def test_signals_that_not_every_run_was_asked_for_are_left_out():
    tables = exit_tables([outcome("vanilla", [{OURS: 0.2, "kl": 0.1, "new": 0.3}, {OURS: 0.3, "kl": 0.4}])])
    assert tables[0].header[-2:] == [OURS, "kl"]


def test_patience_is_held_against_patience():
    rows = [{OURS: 0.1, PATIENT: 0.5 + seed / 100, "kl": 0.9, "kl+1": 0.3 - seed / 100} for seed in range(3)]
    found = [outcome("vanilla", rows)]
    compared = against({each.variant: each.exits for each in found}, ABOVE, PATIENT)
    assert list(compared) == ["kl+1"] and compared["kl+1"][POOLED].mean == pytest.approx(-0.22)
    table = next(each for each in exit_tables(found) if each.name == "exits_patient_above")
    assert [row[0] for row in table.rows] == [f"{PATIENT} − kl+1"] and table.rows[0][-1] == "better"


def test_tables_and_the_figure_have_every_model():
    found = made_up()
    tables = exit_tables(found)
    names = ["gap", "above", "against_gap", "against_above", "against_loops", "chosen", "kinds"]
    assert [table.name for table in tables] == [f"exits_{name}" for name in names]
    assert [row[0] for row in tables[2].rows] == [f"{OURS} − kl", f"{OURS} − entropy"]
    assert tables[4].rows[-1][0] == f"{OURS} − {FIXED}" and tables[5].rows[0][2].value == 1.75
    assert "vanilla" in csv_text(tables) and "−" not in tables[0].rows[0][0]
    [picture] = exit_pictures(found)
    assert [axes.get_title() for axes in picture.figure.axes] == ["vanilla", "operloop"]
    assert exit_tables([Outcome("x", {}, {}, {}, {}, {}, {})]) == [] == exit_pictures([])


@pytest.mark.long
@pytest.mark.parametrize("name", ["exits_deref", "exits_text"])
def test_the_shipped_studies_load_and_ask_for_exits(name):
    plan = load_plan(name, scale="smoke")
    assert all(cell.exits for cell in plan.cells) and len(plan.study.variants) == 6
    steps = {variant: plan.config(variant).model.loop.options.get("step") for variant in plan.study.variants}
    assert list(steps.values()).count("sigmoid") == 2
