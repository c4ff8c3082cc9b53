"""Tokens that leave the loop while they are decoded: the cache against the masked parallel forward."""

import math

import pytest
import torch
from hf_models import SHARED, tokens, wrapped
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.generation import ContinuousBatchingConfig

import looptim as lo
from looptim.hf import LoopedForCausalLM
from looptim.loop.depth import Exit, PerToken

pytestmark = pytest.mark.long

GREEDY = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}
CHUNKS = [3, 4, 7, *[1] * 6]
CACHING = sorted(lo.PRESETS.keys() - {"none"})


def spread(model):
    """An exit that lets tokens out at several depths: halfway between two values of its signal, amid all of them."""
    with torch.no_grad(), lo.trace(model.looped) as seen:
        model.looped(tokens())
    objective = model.looped.loops[0].transitions[0].objective
    values = [objective.residual(o, t) for o, t in zip(seen.read, seen.target, strict=True)]
    values = values[0].flatten().sort().values
    middle = values[len(values) // 3 : 2 * len(values) // 3]
    widest = middle.diff().argmax()
    return Exit("residual", middle[widest : widest + 2].mean().item())


@torch.no_grad()
def decode(model, input_ids, chunks, cache, attention_mask=None):
    """The logits and the depth of every position, the tokens given a chunk at a time."""
    logits, depths, start = [], [], 0
    for chunk in chunks:
        mask = None if attention_mask is None else attention_mask[:, : start + chunk]
        part = input_ids[:, start : start + chunk]
        out = model(part, attention_mask=mask, past_key_values=cache, use_cache=True)
        logits.append(out.logits)
        depths.append(out.depth[0])
        start += chunk
    return torch.cat(logits, dim=1), torch.cat(depths, dim=1)


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("preset", CACHING)
@torch.no_grad()
def test_cached_decoding_is_the_masked_parallel_forward(preset, attention):
    model = wrapped(preset)
    depth = spread(model)
    hidden = model.looped.hidden(model.looped.embed(tokens()), depth=depth)
    expected, depths = model.looped.head(hidden.h), hidden.depth[0]
    assert depths.unique().numel() > 1
    model.set_attn_implementation(attention)
    model.set_depth(depth)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
        logits, found = decode(model, tokens(), CHUNKS, cache)
        assert torch.equal(found, depths)
        assert_close(logits, expected)
    model.set_depth(PerToken(depths))
    replayed, again = decode(model, tokens(), CHUNKS, DynamicCache(config=model.config))
    assert_close(replayed, expected)
    assert torch.equal(again, depths)


@pytest.mark.parametrize("layout", ["0-2x3-0", "1-1x2-1x3-1"])
@pytest.mark.parametrize("pattern", ["S", "F"])
@torch.no_grad()
def test_windows_full_layers_and_several_loops_decode(layout, pattern):
    model = wrapped(layout=layout, pattern=pattern)
    depth = spread(model)
    expected = model.looped(tokens(), depth=depth)
    model.set_depth(depth)
    assert_close(decode(model, tokens(), CHUNKS, DynamicCache(config=model.config))[0], expected)


@pytest.mark.parametrize(("signal", "threshold"), [("kl", 0.05), ("entropy", 3.5), ("margin", 0.9), ("change", 0.5)])
@torch.no_grad()
def test_every_signal_decodes(signal, threshold):
    model = wrapped()
    depth = Exit(signal, threshold)
    expected = model.looped(tokens(), depth=depth)
    model.set_depth(depth)
    assert_close(decode(model, tokens(), CHUNKS, DynamicCache(config=model.config))[0], expected)


@pytest.mark.parametrize("mode", ["end", "compact"])
@torch.no_grad()
def test_readings_through_the_coda_and_batches_that_sequences_leave_decode(mode):
    model = wrapped(layout="1-1x4-2", pattern="SF")
    for signal, threshold, patience in (("kl_coda", 0.05, 0), ("residual", spread(model).threshold, 1)):
        depth = Exit(signal, threshold, mode=mode, patience=patience)
        hidden = model.looped.hidden(model.looped.embed(tokens()), depth=depth)
        assert hidden.depth[0].unique().numel() > 1
        model.set_depth(depth)
        assert model.config.num_hidden_layers == 1 + 4 + 2 + 3 * 2 * (signal == "kl_coda")
        assert "through_coda" not in model.config.to_dict()
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
            logits, depths = decode(model, tokens(), CHUNKS, cache)
            assert torch.equal(depths, hidden.depth[0])
            assert_close(logits, model.looped.head(hidden.h))


@pytest.mark.parametrize("mode", ["end", "compact"])
@torch.no_grad()
def test_left_padding_changes_nothing(mode):
    model, padding = wrapped(), 6
    depth = Exit("residual", spread(model).threshold, mode=mode)
    input_ids, mask = tokens(), torch.ones(2, 20, dtype=torch.long)
    input_ids[1, :padding], mask[1, :padding] = 0, 0
    expected = model.looped(input_ids[1:, padding:], depth=depth)
    model.set_depth(depth)
    logits, _ = decode(model, input_ids, CHUNKS, DynamicCache(config=model.config), mask)
    assert_close(logits[1:, padding:], expected)
    assert_close(logits[:1], model.looped(input_ids[:1], depth=depth))


@torch.no_grad()
def test_a_prompt_at_full_depth_is_the_same_in_chunks():
    model = wrapped()
    model.set_depth(Exit("residual", math.inf, prompt=9))
    logits, depths = decode(model, tokens(), CHUNKS, DynamicCache(config=model.config))
    assert depths.tolist() == [[3] * 9 + [1] * 11] * 2
    assert_close(logits, model.looped(tokens(), depth=Exit("residual", math.inf, prompt=9)))
    assert_close(logits[:, :9], model.looped(tokens())[:, :9])


def greedy_by_hand(model, prompt, depth):
    with torch.no_grad():
        for _ in range(14):
            prompt = torch.cat([prompt, model.looped(prompt, depth=depth)[:, -1:].argmax(-1)], dim=1)
    return prompt


def test_greedy_decoding_is_that_of_the_parallel_forward():
    model = wrapped()
    depth = spread(model)
    expected = greedy_by_hand(model, tokens(2, 8), depth)
    assert not torch.equal(expected, model.generate(tokens(2, 8), **GREEDY))
    model.set_depth(depth)
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 3}):
        assert torch.equal(model.generate(tokens(2, 8), **GREEDY, **options), expected), options
    beams = GREEDY | {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(model.generate(tokens(2, 8), **beams), model.generate(tokens(2, 8), **beams, use_cache=False))


def test_an_assistant_with_fewer_loops_gives_the_tokens_of_the_exit():
    model = wrapped(loop=SHARED)
    model.set_depth(spread(model))
    assistant = LoopedForCausalLM.from_looped(model.looped, loops=1)
    expected = model.generate(tokens(1, 8), **GREEDY)
    assert torch.equal(model.generate(tokens(1, 8), **GREEDY, assistant_model=assistant), expected)


def test_continuous_batching_is_each_prompt_alone():
    model = wrapped()
    model.set_depth(spread(model))
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (3, 7, 11)]
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=14, pad_token_id=0, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64),
        progress_bar=False,
    )
    generated = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    for prompt in prompts:
        expected = model.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :].tolist()
        assert generated[tuple(prompt)] == expected


@torch.no_grad()
def test_a_shared_transition_goes_beyond_its_layout_and_a_token_shift_is_refused():
    model = wrapped(loop=SHARED)
    depth = Exit("residual", 0.0, maximum=5)
    model.set_depth(depth)
    assert model.config.num_hidden_layers == 1 + 2 * 5 + 1
    expected = model.looped(tokens(), depth=lo.depth.Fixed(5))
    assert_close(decode(model, tokens(), CHUNKS, DynamicCache(config=model.config))[0], expected)
    shifted = wrapped(loop={"preset": "full_bandwidth", "options": {"token_shift": True}})
    with pytest.raises(ValueError, match="reads the state of the"):
        shifted.set_depth(depth)
