"""Recirculation as published: two passes a token, the upper layers' cache replaced."""

import pytest
import torch
import transformers

from looptim.hf.recirculate import recirculate

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
BASES = {
    "Llama": ("LlamaForCausalLM", {}),
    "Mistral": ("MistralForCausalLM", {"sliding_window": 4}),
}


def base(name="Llama"):
    kind, options = BASES[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(initializer_range=0.2, **SIZES | options))
    return model.eval()


def tokens(batch=1, length=9):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def by_hand(model, row, destination, source, alpha, ramp):
    """Llama's layers called one by one: the cache of the upper ones is written by the second pass alone."""
    cache, body, logits = transformers.DynamicCache(config=model.config), model.model, []
    for t, token in enumerate(row):
        positions = torch.tensor([[t]])
        rope = body.rotary_emb(body.embed_tokens(token.view(1, 1)), positions)

        def run(h, layers, cache, rope=rope, positions=positions):
            states = [h]
            for layer in layers:
                states.append(
                    layer(states[-1], position_embeddings=rope, past_key_values=cache, position_ids=positions)
                )
            return states

        lower = run(body.embed_tokens(token.view(1, 1)), body.layers[:destination], cache)
        d = lower[-1]
        first = run(d, body.layers[destination:], _copy(cache))
        logits.append(model.lm_head(body.norm(first[-1])))
        s, a = first[source - destination + 1], alpha * min(t / ramp, 1)
        run((1 - a) * d + a * d.norm() * s / s.norm(), body.layers[destination:], cache)
    return torch.cat(logits, 1)


def _copy(cache):
    import copy

    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


@torch.no_grad()
def test_it_is_the_published_equation():
    model = base()
    expected = by_hand(model, tokens()[0], 1, 3, 0.3, 4)
    got = recirculate(model, 1, 3, alpha=0.3, ramp=4)(tokens()).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, model(tokens()).logits, atol=1e-3)
    # The first token has a share of nothing, and the second attends to it as it was.
    torch.testing.assert_close(got[:, :2], model(tokens()).logits[:, :2])


@pytest.mark.parametrize("name", BASES)
@torch.no_grad()
def test_nothing_mixed_is_the_base_and_generation_goes_on_from_its_cache(name):
    model = base(name)
    torch.testing.assert_close(recirculate(model, 1, 3, alpha=0.0)(tokens()).logits, model(tokens()).logits)
    twice = recirculate(model, 1, 3, alpha=0.3, ramp=4)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = twice.generate(tokens(), **options)
    assert torch.equal(twice.generate(tokens(), use_cache=False, **options), whole)
    assert torch.equal(twice(whole[:, :-1]).logits.argmax(-1)[:, 8:], whole[:, 9:])
    # Padding on the left does not count for the ramp.
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens()], 1)
    mask = (torch.arange(12) >= 3).long().unsqueeze(0)
    assert torch.equal(twice.generate(padded, attention_mask=mask, **options)[:, 3:], whole)
    assert {id(weight) for weight in model.parameters()} == {id(weight) for weight in twice.parameters()}
    assert twice(tokens(), labels=tokens()).loss > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 1), "destination .3. must not lie behind source .1."),
        ((1, 5), "be layers from 0 to 4"),
        ((1, 3, {"alpha": 1.5}), "alpha must lie between 0 and 1"),
    ],
)
def test_bad_places_are_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        recirculate(base(), *arguments[:2], **dict(*arguments[2:]))


def test_another_cache_is_refused():
    with pytest.raises(ValueError, match="and was given a StaticCache"):
        recirculate(base(), 1, 3).generate(tokens(), max_new_tokens=2, cache_implementation="static")
