"""A looped pretrained model begins near its base."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import looptim as lo
from looptim.hf.decoder import LoopedDecoderConfig, causal_class
from looptim.hf.starts import STARTS, near_base

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
PRESETS = [*STARTS, "operloop", "operloop_heavyball", "operloop_muon"]


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.2, **SIZES)).eval()


@torch.no_grad()
def distance(looped, base):
    """The mean Kullback-Leibler divergence of the next token, in nats."""
    tokens = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(0))
    ours, theirs = looped.eval()(tokens).logits.log_softmax(-1), base(tokens).logits.log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


@pytest.mark.long
@pytest.mark.parametrize("loops", [2, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_start_near_the_base_is_nearer_than_the_published_one(preset, loops, base):
    near = lo.loop_model(base, f"1-2x{loops}-1", preset)
    config = LoopedDecoderConfig.of(base.config, layout=f"1-2x{loops}-1", preset=preset, options={})
    published = causal_class(config)(config)
    published.load_state_dict(base.state_dict(), strict=False)
    assert distance(near, base) < 0.9 * distance(published, base)


def test_later_loops_of_operloop_begin_as_small_corrections(base):
    naive, near = lo.loop_model(base, "1-2x2-1", "vanilla"), lo.loop_model(base, "1-2x2-1", "operloop")
    assert distance(near, base) < 0.05 * distance(naive, base)


def test_what_is_given_is_kept():
    assert near_base("operloop", 2, {"streams": 4})["read_init"] == 0.25
    assert near_base("operloop", 3, {"shared": True})["step_init"] == pytest.approx(1 / 3)
    assert near_base("huginn", 2, {"inject": "add"})["inject"] == "add"
    assert near_base("vanilla", 2, {}) == {}
