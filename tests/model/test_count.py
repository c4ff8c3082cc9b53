"""Counting: components add up to the model, conventions to their definitions."""

import pytest
import torch

import looptim as lo
from looptim.config import Config, ModelConfig
from looptim.model import document_starts
from looptim.model.attention import visible
from looptim.model.count import mean_keys, training_flops, transition_flops
from looptim.model.lm import LoopedLM

SMALL = {"width": 64, "vocab_size": 100, "heads": 4, "kv_heads": 2, "dense_layers": 2, "experts": 8}


@pytest.mark.parametrize("tied", [False, True])
def test_components_add_up_to_the_models_parameters(tied):
    config = ModelConfig.tiny(layout="2-2x3-1", tied=tied, **SMALL)
    counted = lo.count(config)
    assert sum(counted.parameters.values()) == sum(p.numel() for p in LoopedLM(config, seed=0).parameters())
    assert counted.parameters["head"] == (0 if tied else 6400)
    unused = counted.parameters["routed"] * 6 // 8
    assert sum(counted.active.values()) == sum(counted.parameters.values()) - unused
    assert counted.active["routed"] == counted.parameters["routed"] * 2 // 8


@pytest.mark.parametrize(("length", "window"), [(1, 1), (5, 3), (5, 5), (5, 9), (100, 7)])
def test_mean_keys_by_counting(length, window):
    assert mean_keys([length], window) == pytest.approx(sum(min(i + 1, window) for i in range(length)) / length)


def test_cache_bytes():
    counted = lo.count(ModelConfig.tiny(layout="2-2x3-1", **SMALL), seq_len=100)
    per_layer = 2 * 2 * 2 * 16
    assert counted.kv_bytes_per_token == 9 * per_layer
    sliding, full = 1 + 3 + 1, 1 + 3
    assert counted.kv_bytes == per_layer * (sliding * 8 + full * 100)


def test_transition_flops_of_operloop():
    """The gates' matmul, 2 (2r + 1) r d, dominates; the rest is some twenty elementwise passes over the r x d state."""
    d, r = 1024, 4
    flops = transition_flops(lo.build("operloop", width=d, steps=1, streams=r))
    gates = 2 * (2 * r + 1) * r * d
    assert gates < flops
    assert flops == pytest.approx(129_075, rel=0.02)
    assert transition_flops(lo.build("vanilla", width=d, steps=1)) <= 3 * d


def test_training_flops_of_truncated_backpropagation_by_hand():
    model = ModelConfig.tiny(layout="1-1x3-1x5-1", loop={"preset": "vanilla"}, **SMALL)
    cut = model.model_copy(update={"layout": "1-1x3-1x4-1"})
    forward, backward = (sum(lo.count(each, seq_len=32).flops.values()) for each in (model, cut))
    train = {"seq_len": 32, "loops": {"grad_loops": 4}}
    assert training_flops(Config(model=model, train=train)) == pytest.approx(forward + 2 * backward)
    assert training_flops(Config(model=model, train={"seq_len": 32})) == pytest.approx(3 * forward)


@pytest.mark.parametrize("window", [None, 3, 9])
def test_mean_keys_of_documents_are_what_the_mask_leaves(window):
    lengths = [1, 5, 2, 12]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).unsqueeze(0)
    place, never = torch.arange(20), torch.tensor(0)
    seen = visible(window, document_starts(ids))(never, never, place[:, None], place)
    assert mean_keys(lengths, window) == pytest.approx(seen.sum().item() / 20)


def test_flops_inside_documents_are_fewer_by_the_scores_that_are_not_computed():
    model = ModelConfig.tiny(layout="1-1x3-1", loop={"preset": "vanilla"}, **SMALL)
    config, lengths = Config(model=model, train={"seq_len": 32}), [32, 20, 12, 1, 31]
    whole, parts = lo.count(config), lo.count(config, documents=lengths)
    # Of the five unrolled layers two are sliding, the first and the last, and three full; four heads of sixteen.
    scores = 2 * 2 * 64 * (2 * mean_keys(lengths, 8) + 3 * mean_keys(lengths, None))
    assert parts.flops == {**whole.flops, "attention scores": pytest.approx(scores)}
    assert scores < 0.9 * whole.flops["attention scores"]
    assert parts.kv_bytes == whole.kv_bytes
    assert training_flops(config, documents=lengths) == pytest.approx(3 * sum(parts.flops.values()))
    assert lo.count(config, documents=[32]).flops == whole.flops
    for wrong in ([], [0, 3], [33]):
        with pytest.raises(ValueError, match=r"documents must be lengths from 1 to seq_len \(32\), got"):
            lo.count(config, documents=wrong)


def test_ratios_to_itself_are_one():
    counted = lo.count(ModelConfig.tiny(layout="2-2x3-1", **SMALL))
    assert {ratio for group in counted.ratios(counted).values() for ratio in group.values()} == {1.0}


def test_earlier_read_outs_cost_a_coda_and_a_head_each():
    model = ModelConfig.tiny(layout="1-1x3-1", loop={"preset": "vanilla"})
    costs = [
        training_flops(Config(model=model, optim={"warmup": 0}, train={"seq_len": 32, "loops": {"readouts": number}}))
        for number in (0, 1, 2)
    ]
    whole, bare = (
        lo.count(model.model_copy(update={"layout": layout}), seq_len=32).flop_conventions()["without head"]
        for layout in ("1-1x3-1", "1-1x3-0")
    )
    one = 3 * (whole - bare + 2 * model.width * model.vocab_size)
    assert costs[1] - costs[0] == pytest.approx(one) and costs[2] - costs[1] == pytest.approx(one)
