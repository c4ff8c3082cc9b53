"""Chained assignments: their values by hand, the split, what shortcuts score."""

import numpy as np
import pytest
import torch

from looptim.config import DataConfig
from looptim.data import open_data
from looptim.data.graded import Deref, GradedDataset
from looptim.data.graded.deref import NAMES, VALUES
from looptim.model import IGNORE


def data(fold=0, **knobs):
    return GradedDataset(Deref(knobs, fold=fold), seq_len=140)


def resolve(text):
    """The value of every statement, by looking references up."""
    known = {}
    for name, reference in zip(text[::2], text[1::2], strict=True):
        known[name] = reference if reference in VALUES else known[reference]
    return "".join(known.values())


def test_targets_are_the_values_that_references_lead_to_and_all_depths_are_equally_frequent():
    task = data(chains=5, hops=7)
    for index in range(20):
        text, answers = task.graded.problem("train", 3, index)
        assert resolve(text) == answers and len(set(text[::2])) == 35
        assert np.bincount(task.graded.difficulty_of(text)[1::2]).tolist() == [5] * 7
    tokens, targets, documents = task.windows("train", 3, np.arange(4))
    for row in range(4):
        text = bytes(tokens[row, :70].tolist()).decode()
        assert bytes(targets[row, 1:70:2].tolist()).decode() == resolve(text)
        assert (targets[row, :70:2] == IGNORE).all() and (targets[row, 70:] == IGNORE).all()
        assert (documents[row] == np.where(np.arange(140) < 70, 0, -1)).all()


def test_form_a_has_the_same_problems_a_position_for_each_statement():
    plain, paired = data(chains=5, hops=7), data(chains=5, hops=7, pairs=True)
    tokens, targets, _ = plain.windows("train", 3, np.arange(4))
    together, wanted, documents = paired.windows("train", 3, np.arange(4))
    assert (together[:, :35] == tokens[:, :70:2] * 257 + tokens[:, 1:70:2]).all()
    assert (wanted[:, :35] == targets[:, 1:70:2]).all() and (wanted[:, 35:] == IGNORE).all()
    assert (documents[:, :35] == 0).all() and (documents[:, 35:] == -1).all()
    hops = paired.difficulty_of(torch.from_numpy(together))
    assert hops[0, :35].tolist() == plain.graded.difficulty_of(plain.graded.problem("train", 3, 0)[0])[1::2]
    assert (hops[:, 35:] == -1).all()
    assert plain.difficulty_of(torch.from_numpy(tokens))[:, 1:70:2].tolist() == hops[:, :35].tolist()
    assert (plain.difficulty_of(torch.from_numpy(tokens))[:, ::2] == -1).all()
    assert plain.fingerprint["options"] == {"chains": 5, "hops": 7} != paired.fingerprint["options"]


def orders(task, split, seed):
    """The orders in which chains take turns, whatever their values, of some problems."""
    found = set()
    for index in range(300):
        _, answers = task.graded.problem(split, seed, index)
        names = {}
        found.add("".join(names.setdefault(answer, str(len(names))) for answer in answers))
    return found


def test_the_splits_are_disjoint_whatever_the_names():
    task = data(chains=2, hops=4)
    train, valid = orders(task, "train", 0) | orders(task, "train", 1), orders(task, "valid", 0)
    assert len(train) > 20 and valid and not train & valid


def test_folds_hold_out_other_problems():
    held = [orders(data(fold=fold, chains=2, hops=5), "valid", 0) for fold in range(3)]
    assert all(held) and not (held[0] & held[1] or held[0] & held[2] or held[1] & held[2])
    other = data(fold=1, chains=2, hops=5)
    assert not orders(other, "train", 0) & held[1] and orders(other, "train", 0) & held[0]


def test_shortcuts_score_what_the_docstring_says():
    scores = data(chains=6, hops=10).graded.shortcut_scores(1000)
    by_guess, by_latest = scores["guess among the values seen"], scores["latest value"]
    assert np.allclose(by_guess[1:6], [0.24, 0.19, 0.18, 0.17, 0.17], atol=0.012)
    assert np.allclose(by_latest[1:6], [0.39, 0.23, 0.19, 0.17, 0.17], atol=0.025)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chain": 3}, "no knob 'chain', did you mean 'chains'"),
        ({"pairs": 1}, "knob 'pairs' of task 'deref' must be true or false, got 1"),
        ({"fold": 10}, "data.valid_fold of task 'deref' is from 0 to 9, got 10"),
        ({"hops": 1}, "must be a whole number from 2 to 41, got 1"),
        ({"chains": 10, "hops": 40}, "task 'deref' has 82 names, but chains . hops is 400"),
        ({"chains": 10, "hops": 8}, "takes 160 tokens but a window holds 140"),
    ],
)
def test_bad_knobs_are_one_sentence(options, message):
    assert len(NAMES) == 82
    with pytest.raises(ValueError, match=message):
        data(**options)


def test_it_is_a_source_like_the_others():
    config = DataConfig(source="synthetic:deref", tokenizer="bytes", options={"hops": 3})
    opened = open_data(config, vocab_size=257, seq_len=36)
    batch = opened.batch("valid", seed=0, step=0, batch_size=4)
    assert batch.tokens.shape == (4, 36) and (batch.targets[:, 1::2] != IGNORE).all()
