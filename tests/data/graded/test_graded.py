"""Tasks of known difficulty: answers by hand, the split, difficulties, what shortcuts score."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

from looptim.config import DataConfig
from looptim.data import GRADED, open_data
from looptim.model import IGNORE

SMALL = {
    "deref": {"chains": 2, "hops": 3},
    "phop": {"hops": 4, "length": 24},
    "mano": {"operations": 5},
    "igsm": {"depth": 3, "statements": 6},
    "depo": {"nodes": 6, "hops": 4, "queries": 5},
    "group": {"length": 9},
    "capo": {"people": 30, "values": 8},
}


def task(name, fold=0, **knobs):
    return GRADED[name]({**SMALL[name], **knobs}, fold=fold)


def solve_deref(text):
    known = {}
    for name, reference in zip(text[::2], text[1::2], strict=True):
        known[name] = known.get(reference, reference)
    return {2 * at + 1: answer for at, answer in enumerate(known.values())}


def solve_phop(text):
    """By the published definition, with v counted from 1."""
    p, v = int(text[0]), " " + text[1:]

    def find(times, i):
        return (
            i
            if times == 0
            else (lambda j: j and max([0, *(k for k in range(2, j + 1) if v[k - 1] == v[j])]))(find(times - 1, i))
        )

    return {i: v[find(p, i)] for i in range(1, len(v)) if find(p, i)}


def solve_mano(text):
    """By turning every run of tokens that is an expression into Python, the longest for each end."""

    def value(tokens):
        head = next(tokens)
        if head not in "+-*":
            return f"{ord(head) - ord('a')}"
        return f"({value(tokens)} {head} {value(tokens)})"

    answers = {}
    for start in range(1, len(text)):
        if text[start] in "+-*":
            tokens = iter(text[start:])
            said, end = value(tokens), len(text) - 1 - len(list(tokens))
            answers.setdefault(end, chr(ord("a") + eval(said) % 23))
    return dict(sorted(answers.items()))


def solve_igsm(text):
    statements, asked = text.split("?")
    known, sides = {}, dict(re.findall(r"(\w)=([^;]+);", statements))
    while len(known) < len(sides):
        for name, side in sides.items():
            if all(each in known or not each.isalpha() for each in side):
                known[name] = str(eval("".join(known.get(each, each) for each in side)) % 7)
    return {len(statements) + 1 + at: known[name] for at, name in enumerate(asked)}


def solve_depo(text, nodes=6):
    after = dict(re.findall(r"(.)(.)", text[: 2 * nodes]))
    answers = {}
    for at, (k, node) in enumerate(re.findall(r"(.)(.)", text[2 * nodes :])):
        for _ in range(int(k)):
            node = after[node]
        answers[2 * nodes + 2 * at + 1] = node
    return answers


def solve_group(text):
    """By matrices: S3 in the order in which permutations are listed."""
    matrices = [np.eye(3, dtype=int)[list(each)] for each in itertools.permutations(range(3))]
    product, answers = np.eye(3, dtype=int), {}
    for at, token in enumerate(text):
        product = product @ matrices[ord(token) - 33]
        answers[at] = chr(33 + next(i for i, each in enumerate(matrices) if (each == product).all()))
    return answers


def solve_capo(text, known={}):  # noqa: B006
    """By heart: the first answer that was seen of a person and an attribute must hold for ever."""
    answers = {}
    for index in range(400):
        seen = task("capo").problem("train", 5, index)
        for mark, value in zip(seen.text[4:], seen.answers, strict=True):
            assert known.setdefault((seen.text[:4], mark), value) == value
    for at, mark in enumerate(text[4:], 4):
        answers[at] = known[text[:4], mark]
    return answers


SOLVE = {
    "deref": solve_deref,
    "phop": solve_phop,
    "mano": solve_mano,
    "igsm": solve_igsm,
    "depo": solve_depo,
    "group": solve_group,
    "capo": solve_capo,
}


@pytest.mark.parametrize("name", GRADED)
def test_targets_are_the_answers_wherever_one_is_defined(name):
    config = DataConfig(source=f"synthetic:{name}", tokenizer="bytes", options=SMALL[name])
    data = open_data(config, vocab_size=257, seq_len=60)
    made = task(name)
    batch = data.batch("valid", seed=0, step=0, batch_size=24)
    levels = data.difficulty_of(batch.tokens)
    for row in range(24):
        text, answers = made.problem("valid", 0, row)
        assert len(text) <= made.length and bytes(batch.tokens[row, : len(text)].tolist()) == text.encode("latin-1")
        wanted = SOLVE[name](text)
        assert {at: chr(t) for at, t in enumerate(batch.targets[row].tolist()) if t != IGNORE} == wanted
        assert "".join(wanted.values()) == answers
        assert {at for at, level in enumerate(levels[row].tolist()) if level >= 0} == set(wanted)
        assert (batch.documents[row, : len(text)] == 0).all() and (batch.documents[row, len(text) :] == -1).all()
    assert set(levels.unique().tolist()) == {-1, *made.levels}
    again = data.batch("valid", seed=7, step=0, batch_size=24)
    assert torch.equal(again.tokens, batch.tokens), "validation has one order, whatever the seed"
    assert not torch.equal(data.batch("train", seed=0, step=0, batch_size=24).tokens, batch.tokens)


def forms(made, split, seed, number=150):
    """What tells problems apart, whatever their letters stand for."""
    texts = [made.problem(split, seed, index).text for index in range(number)]
    if made.name == "capo":
        return set(texts)
    if made.name == "igsm":
        texts = [text.partition("?")[0] for text in texts]
    if made.name == "depo":
        # Queries say nothing of the cycle.
        texts = [text[: 2 * made.nodes] for text in texts]
    renamed = set()
    for text in texts:
        names = {}
        kept = r"[a-zA-Z]" if made.name in ("phop", "igsm", "depo") else r"(?!)"
        renamed.add(re.sub(kept, lambda found: f"{names.setdefault(found[0], len(names))} ", text))  # noqa: B023
    return renamed


@pytest.mark.parametrize("name", [name for name in GRADED if name != "deref"])
def test_the_splits_are_disjoint_for_every_seed_and_folds_hold_out_others(name):
    few = {"mano": {"operations": 1}, "group": {"length": 4}, "depo": {"nodes": 5, "hops": 2}}.get(name, {})
    made, other = task(name, **few), task(name, fold=1, **few)
    train = forms(made, "train", 0) | forms(made, "train", 1)
    valid = forms(made, "valid", 0)
    assert train and valid and not train & valid
    assert not valid & forms(other, "valid", 0)


def test_hops_are_drawn_first_so_that_the_last_letter_has_an_answer_after_every_number_of_them():
    made = task("phop", hops=8, length=64)
    seen = [made.problem("train", 0, index) for index in range(200)]
    assert {int(each.text[0]) for each in seen} == set(range(1, 9))
    assert all(made.difficulty_of(each.text)[-1] == int(each.text[0]) for each in seen)
    assert not any(a == b for each in seen for a, b in itertools.pairwise(each.text[1:]))
    # All letters are answers about equally often: at the last place, which the hops were drawn for, the chance is 1/4.
    last = [each.answers[-1] for each in seen]
    assert all(30 <= last.count(letter) <= 70 for letter in "abcd")


@pytest.mark.parametrize(
    ("name", "knobs", "scores"),
    [
        ("phop", {"fewest": 2, "hops": 2}, {"the letter itself": [0.57], "one hop": [0.0], "one hop too few": [0.0]}),
        ("mano", {"operations": 1}, {"the last operation": [1.0], "guess": [1 / 23]}),
        ("igsm", {"depth": 1, "statements": 4}, {"the value of its left side": [1.0, 0.2]}),
        ("depo", {"hops": 2}, {"one step": [1.0, 0.0], "one step too few": [0.0, 0.0]}),
        ("group", {"length": 4}, {"the last element": [1.0, 1 / 6, 1 / 6], "the last two": [1.0, 1.0, 1 / 6]}),
        ("capo", {"attributes": 4}, {"guess": [1 / 8] * 4}),
    ],
)
def test_shortcuts_score_what_they_must(name, knobs, scores):
    found = task(name, **knobs).shortcut_scores(300)
    for shortcut, wanted in scores.items():
        assert np.allclose(found[shortcut], wanted, atol=0.08), shortcut


def test_bits_are_of_facts_only():
    made = task("capo", people=100, attributes=5, values=16)
    assert made.bits(math.log(16)) == pytest.approx(0, abs=1e-9) and made.bits(0) == 100 * 5 * 4
    assert made.bits(10.0) == 0 and task("group").bits(0.0) is None


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("phop", {"hop": 3}, "no knob 'hop', did you mean 'hops'"),
        ("phop", {"hops": 8}, "'length' of task 'phop' must be at least 3 . hops . 1 = 25, got 24"),
        ("phop", {"fewest": 5}, "'fewest' of task 'phop' must be at most 'hops' .4., got 5"),
        ("mano", {"fewest": 6}, "'fewest' of task 'mano' must be at most 'operations' .5., got 6"),
        ("igsm", {"statements": 3}, "'statements' of task 'igsm' must be more than 'depth' .3., got 3"),
        ("depo", {"hops": 6}, "fewest <= hops < nodes, got 1, 6 and 6"),
        ("group", {"even": 1}, "knob 'even' of task 'group' must be true or false, got 1"),
        ("capo", {"people": 1}, "must be a whole number from 2 to 456976, got 1"),
        ("capo", {"fold": 10}, "data.valid_fold of task 'capo' is from 0 to 9, got 10"),
    ],
)
def test_bad_knobs_are_one_sentence(name, knobs, message):
    with pytest.raises(ValueError, match=message):
        task(name, **knobs)


def test_a_task_with_hardly_a_held_out_problem_says_so():
    with pytest.raises(ValueError, match="task 'mano' has hardly any valid problems"):
        task("mano", operations=1, modulus=2).problem("valid", 0, 0)
