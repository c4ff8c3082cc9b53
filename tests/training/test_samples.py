"""Text that a run writes at its validations: of the seed alone, and without a trace in what it learns."""

import json

import pytest
from support import config, losses

import looptim as lo


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_samples_are_written_at_validations_and_change_no_loss(tmp_path):
    with_text = lo.train(config(sample="12+34="), tmp_path / "with", progress=False)
    without = lo.train(config(), tmp_path / "without", progress=False)
    assert losses(with_text) == losses(without) and losses(with_text, "valid_loss") == losses(without, "valid_loss")
    assert not (without / "samples.jsonl").exists()
    written = samples(with_text)
    assert [(line["step"], line["prompt"]) for line in written] == [(step, "12+34=") for step in (0, 6, 12)]
    assert len({line["text"] for line in written}) > 1
    # The model has room for 32 tokens, of which the prompt takes six.
    assert all(len(line["text"]) <= 26 for line in written)


@pytest.mark.long
def test_a_resumed_run_writes_what_it_would_have_written(tmp_path):
    whole = lo.train(config(sample="1+"), tmp_path / "whole", progress=False)
    cut = lo.train(config(sample="1+", steps=6), tmp_path / "cut", progress=False)
    with (cut / "samples.jsonl").open("a") as file:
        file.write('{"step": 9, "tokens": 1, "prompt": "1+", "text": "of a later checkpoint"}\n{"step": 12')
    # The rate of the first half is not that of a shorter run, but the texts are of steps 0, 6 and 12 alike.
    lo.train(config(sample="1+"), cut, resume=True, force=True, progress=False)
    assert [line["step"] for line in samples(cut)] == [0, 6, 12]
    assert samples(cut)[0] == samples(whole)[0]


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"train\.sample has 40 tokens, but model\.max_length is 32"):
        lo.train(config(sample="1" * 40), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
