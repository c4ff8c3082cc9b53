"""Trials before a study: as many for each variant, on seeds and held-out documents that are not reported."""

import json

import pytest

import looptim as lo
from looptim.config import DataConfig
from looptim.data import open_data
from looptim.data.corpus import held_out
from looptim.data.sources import find_source
from looptim.recipe import find_file, shipped
from looptim.studies.measures import Outcome
from looptim.studies.spec import load_plan
from looptim.studies.tuning import choose, combinations, plan_trials, trial_name

pytestmark = pytest.mark.long

STUDY = """
title = "Two"
base = "smoke"
tokens = 20_480
seeds = [0, 1]
reference = "vanilla"
matched = false
[tune]
seeds = [100]
tokens = 10_240
trials = { "optim.lr" = [1e-3, 2e-3, 4e-3] }
[variants.vanilla]
preset = "vanilla"
[variants.operloop]
preset = "operloop"
trials = { "loop.options.step_init" = [0.5, 0.75, 0.9] }
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "two.toml").write_text(STUDY)
    return tmp_path / "two.toml"


def trials(file, old="", new="", **options):
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new) if old else file.read_text())
    plan = load_plan(file, **options)
    return plan, plan_trials(file, plan, **{key: value for key, value in options.items() if key == "set"})


def test_every_variant_has_as_many_trials_with_its_own_values(file):
    plan, made = trials(file)
    assert len(made.cells) == 6 and {cell.seed for cell in made.cells} == {100}
    rates = {cell.variant: cell.config.optim.lr for cell in made.cells}
    assert rates["vanilla, optim.lr=0.004"] == 4e-3
    steps = [cell.config.model.loop.options.get("step_init") for cell in made.cells]
    assert steps == [None] * 3 + [0.5, 0.75, 0.9]
    assert made.tokens < plan.tokens


@pytest.mark.parametrize(
    "name", sorted(name for name, path in shipped("studies").items() if "[tune]" in path.read_text())
)
def test_seeds_and_documents_of_trials_are_not_reported(name):
    """Of every shipped study: other seeds, and a held-out text of which nothing is in the reported one."""
    plan = load_plan(name)
    made = plan_trials(find_file("studies", name), plan)
    assert not {cell.seed for cell in made.cells} & {cell.seed for cell in plan.cells}
    ours, theirs = plan.cells[0].config.data, made.cells[0].config.data
    if ours.source.startswith("synthetic:"):
        config = plan.cells[0].config
        sizes = {"vocab_size": config.model.vocab_size, "seq_len": config.train.seq_len, "progress": False}
        both = [open_data(data, **sizes).batch("valid", seed=0, step=0, batch_size=64) for data in (ours, theirs)]
        problems = [{tuple(row) for row in batch.tokens.tolist()} for batch in both]
        assert not problems[0] & problems[1]
    else:
        held = [held_out_documents(data) for data in (ours, theirs)]
        assert all(held) and not held[0] & held[1]


def held_out_documents(data: DataConfig):
    documents = find_source(data).documents()
    return {each.digest for each in documents if held_out(each, data.valid_fraction, data.valid_fold) == "valid"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = [100]", "seeds = [1, 100]", r"tune.seeds has \[1\], which the study reports"),
        (
            "[0.5, 0.75, 0.9]",
            "[0.5, 0.9]",
            r"different numbers of trials \('vanilla' 3, 'operloop' 2\); give each as many",
        ),
        ("seeds = [100]", 'seeds = [100]\nset = ["data.valid_fold=0"]', "another data.valid_fold than 0"),
        ("seeds = [0, 1]", 'seeds = [0, 1]\nset = ["data.valid_source=x"]', "or another data.valid_source"),
        ("optim.lr", "data.valid_fold", "'data.valid_fold=0.001' would change nothing: a study has data from its base"),
        ("optim.lr", "optim.rate", "variant 'vanilla.*unknown key 'rate'"),
    ],
)
def test_trials_that_would_not_be_fair_are_one_sentence(file, old, new, message):
    with pytest.raises(ValueError, match=message) as error:
        trials(file, old, new)
    assert "\n" not in str(error.value)


def outcome(name, loss):
    return Outcome(name, {}, {} if loss else {100: "diverged"}, {100: loss} if loss else {}, {}, {}, {})


def test_the_best_trial_is_chosen_one_that_diverged_is_not_and_an_edge_is_said(file):
    plan, _ = trials(file)
    losses = {"vanilla": [3.0, 2.0, None], "operloop": [1.0, 2.0, 3.0]}
    keys = {"vanilla": {"optim.lr": (1e-3, 2e-3, 4e-3)}, "operloop": {"loop.options.step_init": (0.5, 0.75, 0.9)}}
    found = [
        outcome(trial_name(name, changes), loss)
        for name, values in losses.items()
        for changes, loss in zip(combinations(keys[name]), values, strict=True)
    ]
    chosen = choose(plan.study, found)
    assert chosen["vanilla"].changes == ("optim.lr=0.002",) and not chosen["vanilla"].edges
    assert chosen["operloop"].changes == ("loop.options.step_init=0.5",)
    assert chosen["operloop"].edges == ("loop.options.step_init",)
    unfinished = [*found[:-1], Outcome(found[-1].variant, {}, {}, {}, {}, {}, {})]
    assert list(choose(plan.study, unfinished)) == ["vanilla"]


def test_a_tuned_study_reports_what_its_trials_chose_and_is_read_again_from_its_archives(file):
    out = file.parent / "out"
    lo.study(file, out, progress=False)
    made = json.loads((out / "tuning" / "results.json").read_text())["variants"]
    best = min((name for name in made if name.startswith("vanilla")), key=lambda name: made[name]["loss"]["mean"])
    text = (out / "results.md").read_text()
    assert best.removeprefix("vanilla, ") in text and "Tuned by 3 trials each, on other seeds (100)" in text
    for folder in (out, out / "tuning"):
        assert (folder / "runs.zip").stat().st_size < 400_000
    (out / "runs").rename(file.parent / "gone")
    before = (out / "results.json").read_bytes()
    lo.study(file, out, jobs=0, progress=False)
    assert (out / "results.json").read_bytes() == before
