"""Tokens that leave the loops of a foreign decoder one by one."""

import math

import pytest
import torch
import transformers

import looptim as lo

pytestmark = pytest.mark.long

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
BASES = {"Llama": {}, "Gemma3": {"query_pre_attn_scalar": 8, **SLIDING}, "GptOss": {"num_local_experts": 4, **SLIDING}}


def looped(name="Llama", preset="operloop", **options):
    kind = {"Gemma3": "Gemma3Text"}.get(name, name)
    config = getattr(transformers, f"{kind}Config")(**SIZES | BASES[name])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for weight in base.parameters():
                weight += 0.05 * torch.randn_like(weight)
        return lo.loop_model(base, "1-2x3-1", preset, **options)


def tokens(batch=2, length=12):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(0))


def leaving(model):
    """An exit by which some tokens leave, and some do not; it is set."""
    for threshold in torch.logspace(-2, 1, 60).tolist():
        model.set_depth(lo.depth.Exit("residual", threshold))
        out = model(tokens(), use_cache=False)
        if 0.3 < (out.depth[0] < 3).float().mean() < 0.8:
            return out
    raise AssertionError("no threshold parts the tokens")


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("preset", ["vanilla", "operloop"])
@torch.no_grad()
def test_generation_with_exits_is_the_same_with_and_without_a_cache(name, preset):
    model = looped(name, preset)
    out = leaving(model)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens(), **options), model.generate(tokens(), use_cache=False, **options))
    # One token at a time, the loop ends early, and the visits it skips are in the cache.
    cache, rows, depths = transformers.DynamicCache(config=model.config), [], []
    for i in range(12):
        step = model(tokens()[:, i : i + 1], past_key_values=cache)
        rows.append(step.logits)
        depths.append(step.depth[0])
    torch.testing.assert_close(torch.cat(rows, 1), out.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat(depths, 1), out.depth[0])
    assert {layer.get_seq_length() for layer in cache.layers} == {12}


@torch.no_grad()
def test_the_bounds_are_no_exit_and_one_loop():
    model = looped(shared=True)
    whole = model(tokens()).logits
    for depth in (lo.depth.Exit("residual", 0.0), lo.depth.PerToken(torch.full((2, 12), 3))):
        model.set_depth(depth)
        torch.testing.assert_close(model(tokens()).logits, whole)
    model.set_loops(1)
    once = model(tokens()).logits
    for depth in (lo.depth.Exit("residual", math.inf), lo.depth.PerToken(torch.ones(2, 12, dtype=torch.long))):
        model.set_depth(depth)
        out = model(tokens())
        torch.testing.assert_close(out.logits, once)
        assert out.depth[0].unique().tolist() == [1]
    model.set_depth(None)
    assert torch.equal(model(tokens()).logits, whole) and not hasattr(model(tokens()), "depth")


@torch.no_grad()
def test_recorded_depths_are_replayed_in_part_and_predictions_may_be_looked_at():
    model = looped()
    counts = torch.randint(1, 4, (2, 12), generator=torch.Generator().manual_seed(1))
    model.set_depth(lo.depth.PerToken(counts))
    whole = model(tokens(), use_cache=False)
    cache = transformers.DynamicCache(config=model.config)
    halves = [model(part, past_key_values=cache).logits for part in tokens().split(6, 1)]
    torch.testing.assert_close(torch.cat(halves, 1), whole.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(whole.depth[0], counts)
    model.set_depth(lo.depth.Exit("entropy", 3.9))
    assert model(tokens()).depth[0].shape == (2, 12)


def test_where_keys_cannot_be_held_it_is_said():
    model = looped().train()
    model.gradient_checkpointing_enable()
    model.set_depth(lo.depth.Exit("residual", 0.1))
    with pytest.raises(ValueError, match="gradient checkpointing hides the cache"):
        model(tokens(), labels=tokens(), use_cache=False)
