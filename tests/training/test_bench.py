"""What `looptim bench` measures, and that it measures what it says."""

import itertools
import time

import pytest
import torch

import looptim as lo
from looptim.config import Config, ModelConfig
from looptim.training.bench import _models, _with_preset, medians, rounds

CONFIG = Config(
    model=ModelConfig.tiny(loop={"preset": "huginn", "options": {"inject": "concat"}}),
    train={"batch_size": 4, "micro_batch": 2, "seq_len": 8},
)


def test_ratios_are_to_the_vanilla_loop_and_agree_with_count():
    answer = lo.bench(["operloop", "operloop"], CONFIG, repeats=2)
    vanilla, operloop = answer["rows"]
    assert (vanilla["time"], vanilla["flops"], vanilla["parameters"]) == (1, 1, 1)
    assert answer["tokens"] == 2 * 8, "a micro-batch"
    counts = {name: lo.count(_with_preset(CONFIG, name)) for name in ("vanilla", "operloop")}
    assert operloop["flops"] == pytest.approx(counts["operloop"].ratios(counts["vanilla"])["flops"]["total"])
    assert operloop["parameters"] == pytest.approx(counts["operloop"].ratios(counts["vanilla"])["parameters"]["total"])
    low, high = operloop["time_quartiles"]
    assert 0 < low <= operloop["time"] <= high
    forward = sum(counts["vanilla"].flops.values()) * answer["tokens"]
    assert "<th>operloop</th>" in answer._repr_html_()
    assert vanilla["mfu"] == pytest.approx(3 * forward / answer["seconds"] / answer["gemm_peak"])


def test_one_name_may_be_a_string():
    assert [row["name"] for row in lo.bench("huginn", CONFIG, repeats=1)["rows"]] == ["vanilla", "huginn"]


def test_options_belong_to_the_preset_of_the_recipe():
    assert _with_preset(CONFIG, "huginn").model.loop.options == {"inject": "concat"}
    assert _with_preset(CONFIG, "parcae").model.loop.options == {}


def test_transitions_are_measured_around_the_very_same_blocks():
    models = _models({name: _with_preset(CONFIG, name) for name in ("vanilla", "hyperloop")}, torch.device("cpu"))
    assert models["vanilla"].blocks is models["hyperloop"].blocks
    assert [type(p) for p in models["hyperloop"].loops.parameters()]
    assert not list(models["vanilla"].loops.parameters())


def test_variants_take_turns_and_the_first_round_is_not_counted():
    order, first = [], itertools.count()

    def slow_at_first():
        order.append("a")
        if next(first) == 0:
            time.sleep(0.2)

    times = rounds({"a": slow_at_first, "b": lambda: order.append("b")}, 3, "cpu")
    assert order == ["a", "b"] * 4
    assert len(times) == 3
    assert all(turn["a"] < 0.1 for turn in times)
    assert set(medians({"a": slow_at_first}, 1, "cpu")) == {"a"}


@pytest.mark.parametrize(
    ("names", "config", "repeats", "message"),
    [
        (["nothing"], CONFIG, 1, "nothing"),
        (["operloop"], CONFIG, 0, "repeats must be at least 1, got 0"),
        (
            ["operloop"],
            Config(model=ModelConfig.tiny(layout="2", loop={"preset": "none"}), train=CONFIG.train),
            1,
            "layout '2' has no looped segment",
        ),
    ],
)
def test_bad_input_is_one_sentence(names, config, repeats, message):
    with pytest.raises(ValueError, match=message):
        lo.bench(names, config, repeats=repeats)
