"""What a study's runs are called, and what they are given equally much of."""

import re

import pytest
from support import config

from looptim.rundir import Run
from looptim.studies.archive import NAMES
from looptim.studies.figures import loss_minus
from looptim.studies.measures import Outcome
from looptim.studies.spec import Cell, load_plan
from looptim.studies.tables import tables


def test_a_key_that_looptim_gains_renames_no_run():
    # Recorded before there was data.mask_attention: a new key at its default must leave it as it is.
    assert Cell("operloop", 0, config()).name == "operloop_1-1x2-1_s0_cbab7430"
    assert Cell("operloop", 0, config(data={"mask_attention": False})).name == "operloop_1-1x2-1_s0_cbab7430"
    assert Cell("operloop", 0, config(data={"mask_attention": True})).name != "operloop_1-1x2-1_s0_cbab7430"


def test_a_preset_by_the_place_of_its_code_makes_the_name_of_one_folder():
    presets = [
        "my.py:mine",
        "my_py:mine",
        "a/my.py:mine",
        "/a/b/my.py:mine",
        "../my.py:mine",
        "a.b:mine",
        "..",
        "x" * 300,
    ]
    cells = [Cell("own", 0, config({"loop": {"preset": preset}})) for preset in presets]
    names = {cell.name for cell in cells}
    assert cells[0].name.startswith("my-mine_1-1x2-1_s0_")
    assert len(names) == len(presets), "the digest is of the whole"
    assert all(re.fullmatch(NAMES, f"{name}/config.toml") and len(name) < 120 for name in names)


def matched(folder, tokens, more="", budget=1.0):
    path = folder / "matched.toml"
    path.write_text(
        f"title = 'x'\nbase = 'smoke'\ntokens = {tokens}\nseeds = [0]\nreference = 'vanilla'\nmatch = 'flops'\n{more}\n"
        "[variants.vanilla]\npreset = 'vanilla'\n[variants.parcae]\npreset = 'parcae'\n"
        f"[variants.short]\npreset = 'none'\nlayout = '2'\nbudget = {budget}\n"
    )
    return load_plan(path)


@pytest.mark.long
def test_variants_may_have_the_same_flops_and_not_the_same_tokens(tmp_path):
    plan = matched(tmp_path, 200_000)
    steps = {name: plan.config(name).train.steps for name in plan.study.variants}
    assert steps["parcae"] < steps["vanilla"] < steps["short"]
    for name in plan.study.variants:
        assert plan.flops(name) == pytest.approx(1, abs=0.01)
        spent = plan.costs[name] * plan.tokens_of(name)
        assert spent == pytest.approx(plan.costs["vanilla"] * plan.tokens, rel=0.01)
        # The schedule ends with the last update; the reference's is the study's.
        assert plan.config(name).optim == plan.config("vanilla").optim
    assert plan.tokens == pytest.approx(200_000, rel=0.01)
    table = tables(plan, [Outcome(name, {}, {}, {}, {}, {}, {}) for name in plan.study.variants], [])[0]
    assert "tokens" in table.header and "the same training FLOPs" in table.notes[0]
    twice = matched(tmp_path, 200_000, budget=2.0)
    assert twice.flops("short") == pytest.approx(2, abs=0.01)
    with pytest.raises(ValueError, match=r"FLOPs more than 1% off .* give more tokens, or write matched = false"):
        matched(tmp_path, 4_000)
    assert matched(tmp_path, 4_000, "matched = false").config("short").train.steps > 1


def test_losses_are_subtracted_after_the_same_tokens():
    ours, theirs = (
        Run(name, [{"step": at, "tokens": at, "loss": loss(at)} for at in places], {}, {})
        for name, places, loss in [("a", (10, 20, 25), lambda at: 2 * at), ("b", (10, 20, 30, 35), lambda at: at)]
    )
    tokens, values = loss_minus(ours, theirs)
    assert tokens.tolist() == [10, 20] and values.tolist() == [10, 20]


@pytest.mark.long
def test_a_part_of_a_study_is_the_same_study_with_fewer_variants():
    whole = load_plan("confound", scale="smoke")
    part = load_plan("confound", scale="smoke", only=["hyperloop neutral*", "vanilla x6"])
    # The reference comes along, and so does what a variant is against.
    assert list(part.study.variants) == [
        "hyperloop x3",
        "hyperloop neutral x3",
        "hyperloop neutral x6",
        "vanilla x3",
        "vanilla x6",
    ]
    assert {cell.name for cell in part.cells} == {
        cell.name for cell in whole.cells if cell.variant in part.study.variants
    }
    with pytest.raises(ValueError, match=r"only 'hyper' matches none of the study's; it has: hyperloop x3, hyper"):
        load_plan("confound", scale="smoke", only="hyper")


@pytest.mark.long
def test_a_part_of_a_grid_keeps_what_is_not_looped():
    part = load_plan("phi", scale="smoke", only=["vanilla", "huginn*"])
    assert part.study.phi is not None
    assert list(part.study.phi.transitions) == ["vanilla", "huginn, truncated", "huginn"]
    assert [member.name for member in part.study.phi.members()] == list(part.study.variants)
    assert sum(name.startswith("not looped x1") for name in part.study.variants) == 9
