"""Self-speculative decoding against plain decoding: the same tokens, and nothing computed twice."""

import functools
from collections import Counter

import pytest
import torch
from hf_models import SHARED, tiny_config, tokens, wrapped

from looptim.data import Tokenizer
from looptim.generation import generate
from looptim.hf import speculative
from looptim.hf.speculative import speculate
from looptim.loop.depth import Fixed
from looptim.model import LoopedLM

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95}
MODELS = {
    "streams": {"preset": "operloop", "loop": SHARED, "layout": "1-2x5-1"},
    "no coda, no prelude": {"preset": "operloop", "loop": SHARED, "layout": "1x4"},
    "reads the prelude in every loop": {"preset": "huginn", "layout": "1-1x4-2"},
    "remembers a direction": {
        "preset": "operloop_nesterov",
        "loop": {"preset": "operloop_nesterov", "options": {"shared": True}},
        "layout": "1-2x4-1",
    },
}


def write(model, options, draft_loops=None, told=None):
    torch.manual_seed(7)
    method = functools.partial(speculate, draft_loops=draft_loops, on_end=told)
    drafting = {} if draft_loops is None else {"custom_generate": method}
    return model.generate(tokens(1, 6), max_new_tokens=30, pad_token_id=0, eos_token_id=3, **options, **drafting)


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, pytest.param(SAMPLED, marks=pytest.mark.long)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_those_of_plain_decoding(name, options):
    model = wrapped(**MODELS[name])
    plain, tallies = write(model, options), []
    for draft_loops in (1, 3):
        assert torch.equal(write(model, options, draft_loops, tallies.append), plain)
    # Some drafts stood, and some did not.
    assert all(tally.tokens / speculative.LONGEST < tally.rounds < tally.tokens - 1 for tally in tallies)


@pytest.mark.long
def test_a_wrong_draft_costs_rounds_and_no_token(monkeypatch):
    model, tallies = wrapped(**MODELS["streams"]), []
    plain = write(model, SAMPLED)
    finish = speculative.Stages.finish
    # Only a model after all its loops is left as it is.
    wrong = lambda stages, begun: finish(stages, begun) * (1 if len(begun.state.live) == 5 else -1)  # noqa: E731
    monkeypatch.setattr(speculative.Stages, "finish", wrong)
    assert torch.equal(write(model, SAMPLED, 2, tallies.append), plain)
    assert tallies[0].rounds > 0.8 * tallies[0].tokens


def test_what_the_draft_computed_is_not_computed_again():
    model, seen, tallies = wrapped(**MODELS["streams"]), Counter(), []
    for index, slot in enumerate(model.model.slots):
        slot.register_forward_hook(lambda *call, at=index: seen.update({at: call[1][0].shape[2]}))
    write(model, {"do_sample": False}, 2, tallies.append)
    prelude, early, late = seen[0], [seen[i] for i in range(1, 5)], [seen[i] for i in range(5, 11)]
    # The prompt once, and of what is drafted each token once, in its first loops and in the others.
    assert {prelude, *early, *late} == {prelude}
    assert seen[11] > prelude


@pytest.mark.long
def test_decoding_stops_where_plain_decoding_stops():
    model = wrapped(**MODELS["streams"])
    whole = write(model, SAMPLED)[0, 6:].tolist()
    for length in (1, 7, len(whole)):
        options = {"max_new_tokens": length, "pad_token_id": 0, "eos_token_id": None, **SAMPLED}
        torch.manual_seed(7)
        method = functools.partial(speculate, draft_loops=2)
        out = model.generate(tokens(1, 6), custom_generate=method, **options)[0, 6:].tolist()
        assert out == whole[:length]
        assert len(out) == length


@pytest.mark.parametrize(
    ("changes", "draft_loops", "message"),
    [
        ({}, 1, "operloop has loop-specific parameters, so that its first loops are no model of their own"),
        ({"loop": SHARED}, 3, "draft_loops must be at least 1 and less than the 3 loops that are run, got 3"),
        ({"loop": SHARED}, 0, "draft_loops must be at least 1 and less than the 3 loops that are run, got 0"),
        ({"loop": SHARED, "layout": "1x2-1x2"}, 1, "the layout has 2 looped segments"),
        ({"preset": "none"}, 1, "the layout has 0 looped segments"),
    ],
)
def test_what_cannot_draft_is_refused(changes, draft_loops, message):
    with pytest.raises(ValueError, match=message):
        write(wrapped(**changes), {"do_sample": False}, draft_loops)


def test_generate_streams_the_same_text():
    tokenizer = Tokenizer.bytes()
    config = tiny_config(loop=SHARED, layout="1-2x4-1", vocab_size=tokenizer.vocab_size, max_length=64)
    model, pieces = LoopedLM(config, seed=0).eval(), []
    options = {"max_new_tokens": 20, "seed": 3, "loops": 6}
    plain = generate(model, tokenizer, "loop", **options)
    assert generate(model, tokenizer, "loop", draft_loops=2, stream=pieces.append, **options) == plain
    assert "".join(pieces) == plain
    with pytest.raises(ValueError, match="do not go together"):
        generate(model, tokenizer, "loop", draft_loops=2, depth=Fixed(3))
    shifted = {"preset": "full_bandwidth", "options": {"token_shift": True}}
    shifting = LoopedLM(tiny_config(loop=shifted, vocab_size=tokenizer.vocab_size), seed=0).eval()
    with pytest.raises(ValueError, match="without a KV cache"):
        generate(shifting, tokenizer, "loop", draft_loops=2)
