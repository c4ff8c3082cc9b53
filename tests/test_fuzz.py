"""Recipes and small models at random: one sentence for what is refused, and what is not refused does as it should."""

import string

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import looptim as lo
from looptim.config import ModelConfig
from looptim.loading import wrap
from looptim.loop.state import Noise
from looptim.recipe import shipped
from looptim.rundir import flat

KEYS = sorted(flat(lo.load_config("nano").model_dump()) | {"loop.preset": 0, "loop.options.streams": 0, "base": 0})
numbers = st.one_of(st.integers(-3, 9), st.sampled_from([2**31, 2**63 - 1, 2**64, -(2**63)]), st.floats())
words = st.one_of(st.sampled_from([*lo.PRESETS, "1-1x2-1", "0", "2x2", "SF", "", "stdlib"]), st.text(max_size=6))
values = st.one_of(numbers, words, st.booleans(), st.lists(numbers, max_size=2))
# A recipe is a shipped one with a few keys set, also such as there are none of.
overrides = st.lists(
    st.tuples(st.one_of(st.sampled_from(KEYS), st.text(string.ascii_letters + ".", max_size=9)), values)
)


def loads_or_says_why(recipe: str, changes: list) -> bool:
    """Whether a recipe makes a config that survives its own dump, or is refused in one sentence."""
    try:
        config = lo.load_config(recipe, set=[f"{key}={value}" for key, value in changes])
    except ValueError as error:
        return bool(str(error)) and "\n" not in str(error)
    return type(config).model_validate(config.model_dump()) == config


@st.composite
def models(draw) -> ModelConfig:
    """A model of a few thousand parameters, of any preset, layout and attention."""
    preset = draw(st.sampled_from(sorted(set(lo.PRESETS) - {"none"})))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    head_dim = 2 * draw(st.integers(2, 4))
    rotary = st.integers(1, head_dim // 2).map(lambda half: 2 * half)
    experts = draw(st.integers(1, 4))
    return ModelConfig.tiny(
        layout=draw(st.sampled_from(["1x1", "1x2-1", "1-1x3", "1-2x2-1", "0-1x2-0", "1x2-1x2"])),
        width=8 * draw(st.integers(1, 2)),
        loop={"preset": preset},
        vocab_size=draw(st.integers(2, 17)),
        tied=draw(st.booleans()),
        pattern=draw(st.text("SF", min_size=1, max_size=3)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=draw(st.booleans()),
        window=draw(st.integers(1, 6)),
        sliding_rotary=draw(rotary),
        full_rotary=draw(rotary),
        dense_layers=draw(st.integers(0, 3)),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        balance=draw(st.sampled_from(["pooled", "per_visit"])),
        router=draw(st.sampled_from(["shared", "per_visit"])),
    )


def faults(config: ModelConfig, seed: int) -> list[str]:
    """What is wrong with a model: values or gradients, a token that sees a later one, decoding with a cache."""
    model = lo.LoopedLM(config, seed=seed).double().eval()
    tokens = torch.randint(config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(seed))

    def logits(run, tokens, **options):
        # A start may be noise, which is the same for the same seed.
        torch.manual_seed(seed)
        return run(tokens, **options)

    out = logits(model, tokens)
    found = [] if out.isfinite().all() else ["a value is not finite"]
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % config.vocab_size
    if not torch.allclose(logits(model, changed)[:, :5], out[:, :5], rtol=1e-9, atol=1e-9):
        found.append("a token sees a later one")
    model.loss(tokens, tokens.roll(-1, 1)).loss.backward()
    if not all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
        found.append("a gradient is not finite")
    if any(isinstance(module, Noise) for module in model.modules()):
        # A token drawn alone has other noise than the same token in its sequence.
        return found
    if config.window == 1:
        # The caches of transformers do not hold a window of one token, and the model refuses them in a sentence.
        return found
    wrapped = wrap(model)
    cache = DynamicCache(config=wrapped.config)
    with torch.no_grad():
        steps = [wrapped(tokens[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(9)]
    same = torch.allclose(torch.cat(steps, 1), out, rtol=1e-6, atol=1e-6)
    return found if same else [*found, "decoding with a cache gives other logits"]


quick = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
many = settings(quick, max_examples=1500, derandomize=False)


@pytest.mark.long
@quick
@given(st.sampled_from(["nano", "smoke", "study"]), overrides)
def test_a_recipe_loads_or_is_refused_in_one_sentence(recipe, changes):
    assert loads_or_says_why(recipe, changes)


@pytest.mark.long
@quick
@given(models(), st.integers(0, 2**32))
def test_a_small_model_is_finite_causal_and_decodes_what_it_computes(config, seed):
    assert faults(config, seed) == []


@pytest.mark.slow
@many
@given(st.sampled_from(sorted(shipped("recipes"))), overrides)
def test_many_recipes_load_or_are_refused_in_one_sentence(recipe, changes):
    assert loads_or_says_why(recipe, changes)


@pytest.mark.slow
@many
@given(models(), st.integers(0, 2**32))
def test_many_small_models_are_finite_causal_and_decode_what_they_compute(config, seed):
    assert faults(config, seed) == []
