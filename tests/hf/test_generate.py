"""The KV cache, and everything `generate` does with it."""

import pytest
import torch
from hf_models import SHARED, looped, tokens, wrapped
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.generation import ContinuousBatchingConfig

import looptim as lo
from looptim.hf import LoopedForCausalLM

pytestmark = pytest.mark.long

GREEDY = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}


def decode(model, input_ids, chunks, cache, attention_mask=None):
    """The logits of every position, the tokens given a chunk at a time."""
    logits, start = [], 0
    for chunk in chunks:
        mask = None if attention_mask is None else attention_mask[:, : start + chunk]
        part = input_ids[:, start : start + chunk]
        logits.append(model(part, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
        start += chunk
    assert start == input_ids.shape[1]
    return torch.cat(logits, dim=1)


# Shorter than the window, across its edge, longer than it, then token by token.
CHUNKS = [3, 4, 7, *[1] * 6]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("preset", list(lo.PRESETS))
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(preset, attention):
    model = wrapped(preset)
    expected = model.looped(tokens())
    model.set_attn_implementation(attention)
    torch.testing.assert_close(model(tokens(), use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
    cached = decode(model, tokens(), CHUNKS, DynamicCache(config=model.config))
    torch.testing.assert_close(cached, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("preset", list(lo.PRESETS))
@torch.no_grad()
def test_left_padding_changes_nothing(preset):
    model = wrapped(preset)
    padding = 6
    input_ids, mask = tokens(), torch.ones(2, 20, dtype=torch.long)
    input_ids[1, :padding], mask[1, :padding] = 0, 0
    expected = model.looped(input_ids[1:, padding:])
    full = model(input_ids, attention_mask=mask).logits
    cached = decode(model, input_ids, CHUNKS, DynamicCache(config=model.config), mask)
    for logits in (full, cached):
        assert logits.isfinite().all()
        torch.testing.assert_close(logits[1:, padding:], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits[:1], model.looped(input_ids[:1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["0-2x3-0", "1-1x2-1x3-1", "1-2x1-1"])
@pytest.mark.parametrize("pattern", ["S", "F", "SSSF"])
@torch.no_grad()
def test_every_layout_and_pattern_decodes(layout, pattern):
    model = wrapped(layout=layout, pattern=pattern)
    cached = decode(model, tokens(), CHUNKS, DynamicCache(config=model.config))
    torch.testing.assert_close(cached, model.looped(tokens()), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_static_cache_decodes():
    model = wrapped()
    cached = decode(model, tokens(), CHUNKS, StaticCache(config=model.config, max_cache_len=32))
    torch.testing.assert_close(cached, model.looped(tokens()), rtol=1e-5, atol=1e-5)


def test_every_unrolled_layer_has_its_own_place_in_the_cache():
    model = wrapped()
    cache = model(tokens()).past_key_values
    assert len(cache.layers) == len(model.model.slots) == model.config.num_hidden_layers == 8
    assert [slot.layer_idx for slot in model.model.slots] == list(range(8))
    assert not any(torch.equal(cache.layers[1].keys, layer.keys) for layer in cache.layers[3::2])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_equals_greedy_without_a_cache(tied, attention):
    model = wrapped(tied=tied)
    model.set_attn_implementation(attention)
    expected = tokens(2, 8)
    with torch.no_grad():
        for _ in range(14):
            expected = torch.cat([expected, model.looped(expected)[:, -1:].argmax(-1)], dim=1)
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 3}):
        assert torch.equal(model.generate(tokens(2, 8), **GREEDY, **options), expected), options


def test_sampling_repeats_with_its_seed():
    model = wrapped()
    options = {"do_sample": True, "max_new_tokens": 10, "top_k": 10, "temperature": 0.7, "pad_token_id": 0}

    def sample(seed, **more):
        torch.manual_seed(seed)
        return model.generate(tokens(2, 8), **options, **more)

    assert torch.equal(sample(1), sample(1))
    assert torch.equal(sample(1), sample(1, use_cache=False))
    assert not torch.equal(sample(1), sample(2))


def test_beam_search_equals_beam_search_without_a_cache():
    model = wrapped()
    options = GREEDY | {"num_beams": 3, "num_return_sequences": 2}
    expected = model.generate(tokens(2, 8), **options, use_cache=False)
    assert torch.equal(model.generate(tokens(2, 8), **options), expected)
    greedy = model.generate(tokens(2, 8), **GREEDY)
    assert not torch.equal(expected[::2], greedy)


def test_a_left_padded_batch_equals_single_prompts():
    model = wrapped()
    prompts = [tokens(1, length, seed=length) for length in (3, 7, 11)]
    batch = torch.cat([torch.nn.functional.pad(p, (11 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (11 - p.shape[1], 0)) for p in prompts])
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        together = model.generate(batch, attention_mask=mask, **GREEDY, **options)
        for row, prompt in zip(together, prompts, strict=True):
            assert torch.equal(row[11:], model.generate(prompt, **GREEDY)[0, prompt.shape[1] :]), options


def test_generation_from_embeddings_and_by_prompt_lookup():
    model = wrapped()
    expected = model.generate(tokens(1, 8), **GREEDY)
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(tokens(1, 8)), **GREEDY)
    assert torch.equal(embedded, expected[:, 8:])
    assert torch.equal(model.generate(tokens(1, 8), **GREEDY, prompt_lookup_num_tokens=3), expected)


def test_a_sequence_that_ended_is_padded_and_does_not_disturb_the_others():
    model = wrapped()
    free = model.generate(tokens(2, 8), **GREEDY)
    end = free[0, 11].item()
    stopped = model.generate(tokens(2, 8), **GREEDY, eos_token_id=end)
    first = free[0, 8:].tolist().index(end) + 9
    assert torch.equal(stopped[0, :first], free[0, :first]) and not stopped[0, first:].any()
    length = stopped.shape[1]
    until = next((i for i in range(8, length) if free[1, i] == end), length)
    assert torch.equal(stopped[1, :until], free[1, :until])


def test_a_conversation_continues_from_its_cache():
    model = wrapped()
    first = model.generate(tokens(1, 8), **GREEDY, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, tokens(1, 3, seed=5)], dim=1)
    again = model.generate(longer, **GREEDY, past_key_values=first.past_key_values)
    assert torch.equal(again, model.generate(longer, **GREEDY))


def test_continuous_batching_equals_single_prompts():
    model = wrapped()
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (3, 7, 11, 18)]
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


@pytest.mark.parametrize("assistant_loops", [1, 2])
@pytest.mark.parametrize("loop", [SHARED, {"preset": "huginn"}, {"preset": "parcae"}], ids=lambda loop: loop["preset"])
def test_fewer_loops_as_the_assistant_give_exactly_the_greedy_tokens(loop, assistant_loops):
    model = wrapped(loop=loop)
    assistant = LoopedForCausalLM.from_looped(model.looped, loops=assistant_loops)
    assert assistant.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert assistant.config.num_hidden_layers < model.config.num_hidden_layers
    for seed in range(3):
        prompt = tokens(1, 8, seed)
        expected = model.generate(prompt, **GREEDY)
        assert torch.equal(model.generate(prompt, **GREEDY, assistant_model=assistant), expected)


def test_hidden_states_and_attentions_come_with_generation():
    model = wrapped()
    model.set_attn_implementation("eager")
    output = model.generate(
        tokens(1, 8), **GREEDY, return_dict_in_generate=True, output_hidden_states=True, output_attentions=True
    )
    assert len(output.hidden_states) == len(output.attentions) == 14
    assert all(len(step) == 9 for step in output.hidden_states)
    assert all(len(step) == 8 for step in output.attentions)


def test_generation_past_the_maximum_length_is_refused():
    model = wrapped(max_length=16)
    with pytest.raises(ValueError, match="17 tokens, but max_position_embeddings is 16"):
        model.generate(tokens(1, 8), do_sample=False, max_new_tokens=14)


SHIFTED = {"preset": "full_bandwidth", "options": {"token_shift": True}}


def test_a_token_shift_refuses_the_cache_and_generates_without():
    model = wrapped(loop=SHIFTED)
    for call in (lambda: model(tokens(), use_cache=True), lambda: model.generate(tokens(1, 8), **GREEDY)):
        with pytest.raises(ValueError, match=r"token_shift=True .* use_cache=False"):
            call()
    assert model(tokens()).past_key_values is None
    generated = model.generate(tokens(1, 8), **GREEDY, use_cache=False)
    with torch.no_grad():
        assert torch.equal(model.looped(generated)[0, 7:-1].argmax(-1), generated[0, 8:])


@pytest.mark.parametrize("where", ["map", "bias"])
def test_a_projection_of_ones_own_that_mixes_tokens_is_decoded_without_a_cache(monkeypatch, tmp_path, where):
    class Before(lo.Projection):
        """It does not say that it mixes tokens: that is found out."""

        def forward(self, ctx):
            shifted = torch.nn.functional.pad(ctx.e[:, :-1], (0, 0, 1, 0))
            return (lo.maps.Shift(), ctx.e) if where == "map" else (lo.maps.Identity(), shifted)

    def before(width, steps):
        parts = lo.build("vanilla", width=width, steps=steps).transitions[0]
        transition = lo.Transition(Before(), parts.objective, parts.rule, write=lo.presets.IdentityWrite())
        return lo.Loop(transition, width=width, steps=steps)

    monkeypatch.setitem(lo.PRESETS, "before", before)
    model = wrapped(loop={"preset": "before"})
    model.save_pretrained(tmp_path)
    for each in (model, LoopedForCausalLM.from_pretrained(tmp_path)):
        assert not each.model.caches
        with pytest.raises(ValueError, match="use_cache=False"):
            each.generate(tokens(1, 8), **GREEDY)


def test_a_token_shift_refuses_padding_on_the_left():
    model = wrapped(loop=SHIFTED)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 15:] = 0
    same = model(tokens(), attention_mask=mask).logits[1, :15]
    torch.testing.assert_close(same, model.looped(tokens()[1:, :15])[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="pad on the right"):
        model(tokens(), attention_mask=mask.flip(-1))


def test_a_window_of_one_token_refuses_the_cache():
    model = wrapped(window=1)
    with pytest.raises(ValueError, match="window of 1 token"):
        model(tokens(), use_cache=True)
    torch.testing.assert_close(model(tokens()).logits, model.looped(tokens()), rtol=1e-5, atol=1e-5)
    assert wrapped(window=1, pattern="F")(tokens()).past_key_values is not None


def test_generation_leaves_the_training_path_alone():
    model = looped()
    before = model(tokens())
    LoopedForCausalLM.from_looped(model).generate(tokens(), **GREEDY)
    assert torch.equal(model(tokens()), before)


def test_a_decode_step_with_a_static_cache_compiles_whole():
    model = LoopedForCausalLM.from_looped(lo.LoopedLM(lo.ModelConfig.tiny(layout="1-2x3-1"), seed=0)).eval()
    ids = torch.randint(257, (2, 17))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -1:]
        cache = StaticCache(config=model.config, max_cache_len=32)
        model(ids[:, :16], past_key_values=cache)
        torch._dynamo.reset()
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        got = step(ids[:, 16:], past_key_values=cache, position_ids=torch.full((2, 1), 16)).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_without_padding_no_mask_is_filled_in_windows_either(monkeypatch):
    model, ids = wrapped(), tokens()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits

        def refuse(*args, **kwargs):
            raise AssertionError("a mask is made")

        monkeypatch.setattr("looptim.hf.model.make_masks", refuse)
        with pytest.raises(AssertionError, match="a mask is made"):
            model(ids)
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
        # All at once, in parts of several tokens, and one by one, far beyond the window of 5.
        cache = DynamicCache(config=model.config)
        got = [
            model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([9, 7, 1, 1, 1, 1], dim=1)
        ]
    torch.testing.assert_close(torch.cat(got, dim=1), expected, rtol=1e-4, atol=1e-5)
