"""The suite of benchmarks: what is counted, and when a comparison with a baseline fails."""

import dataclasses
from pathlib import Path

import pytest
import torch
import typer
from support import run

import looptim as lo
from looptim.cli import costs
from looptim.hf import LoopedForCausalLM, bench, peers
from looptim.hf.baseline import Measure, as_json, read, regressions, update
from looptim.hf.bench import count_operations, kept_memory, saved_words, suite
from looptim.training.peak import clock

STEADY = Measure("time", 1.00, 1.01, 1.02, "lower")


@pytest.fixture
def baseline(tmp_path):
    file = tmp_path / "baseline.json"
    file.write_text(as_json([STEADY, Measure("speed", 1.38, 1.40, 1.42, "higher")]))
    return file


def test_a_regression_is_what_is_worse_beyond_the_noise_of_both(baseline):
    assert regressions([STEADY, Measure("speed", 1.3, 1.3, 1.4, "higher")], baseline) == []
    assert regressions([Measure("time", 0.5, 0.5, 0.5, "lower"), Measure("speed", 2, 2, 2, "higher")], baseline) == []
    slow = dataclasses.replace(STEADY, low=1.19, median=1.2, high=1.21)
    assert regressions([slow], baseline) == ["time: 1.010 -> 1.200, noise 0.060"]
    assert len(regressions([Measure("speed", 0.99, 1.0, 1.01, "higher")], baseline)) == 1


def test_another_kind_of_processor_is_not_compared(baseline):
    baseline.write_text(baseline.read_text().replace('"processor": "', '"processor": "another '))
    assert regressions([dataclasses.replace(STEADY, median=9.0)], baseline) is None


def test_what_is_no_baseline_is_refused(tmp_path):
    for text in ("[]", "", '{"measures": [1]}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match="no baseline"):
            regressions([STEADY], tmp_path / "other.json")


def test_a_baseline_grows_group_by_group_under_the_same_conditions(baseline):
    update(baseline, [dataclasses.replace(STEADY, median=1.015), Measure("words", 5, 5, 5, "lower")])
    assert {name: measure.median for name, measure in read(baseline)[1].items()} == {
        "time": 1.015,
        "speed": 1.40,
        "words": 5,
    }
    baseline.write_text(baseline.read_text().replace('"threads": ', '"threads": 9'))
    with pytest.raises(ValueError, match="was measured with"):
        update(baseline, [STEADY])


@pytest.mark.long
def test_a_slowdown_fails_and_an_equal_run_passes(baseline, monkeypatch, capsys):
    seconds = {"theirs": 0.03, "ours": 0.03}
    calls = {name: lambda name=name: spend(seconds[name]) for name in seconds}
    monkeypatch.setitem(bench.SUITE, "decoding", lambda repeats: [bench._speed("decoding", calls, repeats)])
    options = {"names": None, "suite": True, "only": ["decoding"], "repeats": 9}
    costs.bench(**options, update=baseline)
    costs.bench(**options, baseline=baseline)
    seconds["ours"] *= 4
    with pytest.raises(typer.Exit) as ended:
        costs.bench(**options, baseline=baseline)
    assert ended.value.exit_code == 1
    assert "worse than the baseline:\ndecoding: " in capsys.readouterr().err


def spend(seconds):
    """Compute for so long, by the clock of the bench."""
    now = clock("cpu")
    end = now() + seconds
    while now() < end:
        pass


def test_only_takes_the_groups_there_are(monkeypatch):
    with pytest.raises(ValueError, match="did you mean 'memory'"):
        suite(["memry"])
    monkeypatch.setattr(bench, "SUITE", {"time": lambda repeats: [STEADY] * repeats, "other": lambda repeats: []})
    assert suite(["time", "time"], repeats=2) == suite(repeats=2) == [STEADY] * 2


def test_the_committed_baseline_and_the_page_say_the_same():
    folder = Path(__file__).parents[2]
    known, measures = read(folder / "benchmarks" / "baseline.json")
    assert known["threads"] == 1
    page = (folder / "docs" / "performance.md").read_text()
    assert all(f"| {' | '.join(measure.cells)} |" in page for measure in measures.values())


@pytest.mark.long
def test_counts_of_a_step():
    assert 5 < saved_words(reversible=False).median < 5.4
    assert 1 < saved_words(reversible=True).median < 1.5
    assert 1 < kept_memory(4, 12).median < 1.5
    config = lo.ModelConfig.tiny(layout="1-2x3-1")
    model = LoopedForCausalLM.from_looped(lo.LoopedLM(config, seed=0)).eval()
    # Eight unrolled layers.
    assert count_operations(model, torch.zeros(1, 4, dtype=torch.long)) < 8 * 50


def test_peers_have_the_unrolled_size():
    config = lo.ModelConfig.tiny(layout="1-2x3-1", dense_layers=1)
    model = peers.glm4_moe(config)
    assert len(model.model.layers) == 8
    assert model.model.layers[1].mlp.gate.weight.shape == (config.experts, config.width)
    dense = lo.ModelConfig.tiny(layout="1-2x3-1", dense_layers=4)
    ours, theirs = (sum(p.numel() for p in m.parameters()) for m in (lo.LoopedLM(dense, seed=0), peers.qwen3(dense)))
    # Eight layers of their own where four are shared.
    assert ours < theirs < 2.1 * ours
    for model in (lo.LoopedLM(dense, seed=0), peers.qwen3(dense)):
        peers.training_call(model, torch.zeros(1, 4, dtype=torch.long))()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.long
def test_the_suite_takes_no_recipe():
    answer = run("bench", "operloop", "--suite")
    assert answer.returncode == 2
    assert "--suite" in answer.stderr
