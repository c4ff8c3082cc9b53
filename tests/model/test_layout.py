"""What a layer is stands in one table: model, count and transformers adapter follow it."""

import pytest
import torch

import looptim as lo
from looptim.config import ATTENTION_LETTERS, ModelConfig
from looptim.hf import LoopedForCausalLM
from looptim.model import ATTENTION, AttentionKind, LayerSpec, Layout
from looptim.model.lm import LoopedLM


@pytest.mark.parametrize(
    ("layout", "distinct", "depth"),
    [
        ("18", 18, 18),
        ("4-4x3-2", 10, 18),
        ("0-6x4-0", 6, 24),
        ("2-1x3-1x3-2", 6, 10),
        ("4-8x3-4", 16, 32),
        ("1x2", 1, 2),
    ],
)
def test_layouts_unroll_as_the_paper_says(layout, distinct, depth):
    unrolled = Layout.of(ModelConfig(layout=layout, loop={"preset": "none" if layout == "18" else "vanilla"}))
    assert len(unrolled.blocks) == len(unrolled.visits) == distinct
    assert len(unrolled.layers) == sum(unrolled.visits) == depth


def test_every_layer_knows_its_block_its_visit_and_its_kind():
    config = ModelConfig.tiny(layout="1-2x2-1", pattern="SF", dense_layers=2)
    sliding = AttentionKind("sliding_attention", config.window, config.sliding_rotary, config.sliding_theta)
    full = AttentionKind("full_attention", None, config.full_rotary, config.full_theta)
    layout = Layout.of(config)
    assert layout.layers == [
        LayerSpec(0, 0, sliding, "dense"),
        LayerSpec(1, 0, full, "dense"),
        LayerSpec(2, 0, sliding, "experts"),
        LayerSpec(1, 1, full, "dense"),
        LayerSpec(2, 1, sliding, "experts"),
        LayerSpec(3, 0, full, "experts"),
    ]
    assert [segment.looped for segment in layout.segments] == [False, True, False]
    assert layout.visits == [1, 2, 2, 1]


def test_a_new_kind_of_attention_is_one_letter_and_one_entry(monkeypatch):
    """A second window, checked against a model whose only window is as wide."""
    monkeypatch.setitem(ATTENTION_LETTERS, "W", "wide")
    wide = AttentionKind("wide_attention", 6, 8, 500.0)
    monkeypatch.setitem(ATTENTION, "W", lambda config: wide)
    loop = {"preset": "operloop", "options": {"shared": True}}
    config = ModelConfig.tiny(pattern="W", window=3, loop=loop)
    model = LoopedLM(config, seed=0).double().eval()
    plain = ModelConfig.tiny(pattern="S", window=6, sliding_rotary=8, sliding_theta=500.0, loop=loop)
    same = LoopedLM(plain, seed=0).double().eval()
    tokens = torch.randint(257, (2, 20), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens), same(tokens))
    ours, theirs = lo.count(config, seq_len=20), lo.count(plain, seq_len=20)
    assert (ours.flops, ours.kv_bytes) == (theirs.flops, theirs.kv_bytes)

    mixed = LoopedLM(ModelConfig.tiny(pattern="SWF", window=3, loop=loop), seed=0).double().eval()
    wrapped = LoopedForCausalLM.from_looped(mixed)
    assert set(wrapped.config.layer_types) == {"sliding_attention", "full_attention"}
    with torch.no_grad():
        torch.testing.assert_close(wrapped(tokens).logits, mixed(tokens))
        narrow = LoopedLM(ModelConfig.tiny(pattern="SSF", window=3, loop=loop), seed=0).double().eval()
        assert not torch.allclose(narrow(tokens), mixed(tokens))
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = wrapped.generate(tokens, use_cache=False, **options)
        assert torch.equal(wrapped.generate(tokens, **options), expected)
        static = wrapped.generate(tokens, cache_implementation="static", disable_compile=True, **options)
        assert torch.equal(static, expected)
