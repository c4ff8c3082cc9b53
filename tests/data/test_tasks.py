"""Synthetic tasks: right answers, disjoint splits, windows with the loss on the answers."""

import itertools
import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looptim.data import TASKS, evaluate_exact_match
from looptim.data.tasks import STOP, split_of

KNOBS = {
    "addition": [{"digits": 1}, {"digits": 2}, {"digits": 5, "reverse": False}],
    "hop": [{}, {"hops": 1, "length": 10}, {"hops": 6, "length": 64, "symbols": 6}],
    "chain": [{}, {"length": 2}, {"length": 26, "modulus": 97}],
    "state": [{}, {"length": 1}, {"length": 12, "items": 3}],
}
CASES = [(name, knobs) for name, each in KNOBS.items() for knobs in each]


def solve_addition(prompt, *, reverse=True, digits=2):
    answer = str(sum(map(int, prompt.rstrip("=").split("+")))).zfill(digits + 1)
    return answer[::-1] if reverse else answer


def solve_hop(prompt, *, hops=2, **_):
    letters = list(prompt.rstrip("="))
    at = len(letters) - 1
    for _ in range(hops):
        # Sanford et al.: find(i) = max{j <= i : x_{j-1} = x_i}
        at = max(j for j in range(1, at + 1) if letters[j - 1] == letters[at])
    return letters[at]


def solve_chain(prompt, *, modulus=10, **_):
    *steps, query = prompt.split()
    values = {}
    for step in steps:
        name, expression = step.split("=")
        expression = re.sub(r"[a-z]", lambda found: str(values[found[0]]), expression)
        values[name] = eval(re.sub(r"\b0+(\d)", r"\1", expression)) % modulus
    return str(values[query.rstrip("?")]).zfill(len(str(modulus - 1)))


def solve_state(prompt, *, items=5, **_):
    state = list(range(1, items + 1))
    for move in prompt.rstrip("=").split():
        state = [state[int(place) - 1] for place in move]
    return "".join(map(str, state))


SOLVE = {"addition": solve_addition, "hop": solve_hop, "chain": solve_chain, "state": solve_state}


@pytest.mark.parametrize(("name", "knobs"), CASES)
def test_answers_are_right_and_prompts_of_one_length(name, knobs):
    task = TASKS[name]
    examples = [task.example(split, 3, index, **knobs) for split in ("train", "valid") for index in range(100)]
    for example in examples:
        assert example.answer == SOLVE[name](example.prompt, **knobs), example
        assert STOP not in example.prompt + example.answer
    assert len({(len(example.prompt), len(example.answer)) for example in examples}) == 1
    assert len(set(examples)) > 50
    assert task.example("train", 3, 7, **knobs) == task.example("train", 3, 7, **knobs)
    assert [task.example("train", 4, index, **knobs) for index in range(100)] != examples[:100]


@pytest.mark.parametrize("name", TASKS)
def test_the_form_a_task_shows_is_right(name):
    shown = TASKS[name].form.split(": ")[0]
    prompt = shown[: re.search("[=?](?!.*[=?])", shown).end()]
    assert prompt != shown
    assert shown == prompt + SOLVE[name](prompt)


def test_one_digit_addition_exhaustively_no_problem_or_its_mirror_is_in_both_splits():
    seen = {
        split: {
            TASKS["addition"].example(split, seed, index, digits=1).prompt for seed in (0, 1) for index in range(1500)
        }
        for split in ("train", "valid")
    }
    assert len(seen["train"] | seen["valid"]) == 100
    assert 3 <= len(seen["valid"]) <= 25
    mirrored = {re.sub(r"(\d)\+(\d)", r"\2+\1", prompt) for prompt in seen["train"]}
    assert not (seen["train"] | mirrored) & seen["valid"]


@given(st.sampled_from(CASES), st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_draw_belongs_to_its_split_by_content_alone(case, seed, index):
    name, knobs = case
    task = TASKS[name]
    settings = task.settings(knobs)
    by_prompt = {}
    # Every problem the generator could draw is in one split only, because the prompt determines the canonical form.
    rng = random.Random(seed)
    for problem in filter(None, (task.draw(rng, **settings) for _ in range(10))):
        by_prompt.setdefault(problem.prompt, set()).add(split_of(problem.canonical))
    assert all(len(splits) == 1 for splits in by_prompt.values())
    train, valid = task.example("train", seed, index, **knobs), task.example("valid", seed, index, **knobs)
    assert train.prompt != valid.prompt


@pytest.mark.parametrize(
    ("name", "knobs"), [("state", {"length": 1}), ("chain", {"length": 2}), ("hop", {"hops": 1, "length": 8})]
)
def test_small_tasks_never_overlap_over_many_draws(name, knobs):
    task = TASKS[name]
    seen = {split: {task.example(split, 0, index, **knobs) for index in range(2000)} for split in ("train", "valid")}
    if name == "chain":
        # New names do not make a new problem.
        seen = {
            split: {re.sub("[a-z]", "x", example.prompt) for example in examples} for split, examples in seen.items()
        }
    assert len(seen["valid"]) >= 5
    assert not seen["train"] & seen["valid"]


def test_the_held_out_share_is_a_tenth():
    rng = random.Random(0)
    drawn = [split_of(TASKS["state"].draw(rng, length=4, items=5).canonical) for _ in range(5000)]
    assert 0.08 < drawn.count("valid") / 5000 < 0.12


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        (
            "chain",
            {"length": 1},
            "has only 10 problems at .*, too few to hold some out; raise a knob until there are 50",
        ),
        ("hop", {"hops": 1, "length": 4}, "too few"),
        ("hop", {"hops": 40, "length": 41}, "has only 0 problems"),
        ("state", {"length": 1, "items": 3}, "has only 6 problems"),
        ("hop", {"hops": 25, "length": 32}, "has hardly any train problems"),
        ("addition", {"digit": 2}, "no knob 'digit', did you mean 'digits'? known: digits, reverse"),
        ("addition", {"digits": 0}, "must be a whole number from 1 to 100, got 0"),
        ("addition", {"digits": 2.0}, "must be a whole number"),
        ("addition", {"digits": True}, "must be a whole number"),
        ("addition", {"reverse": 1}, "must be true or false, got 1"),
        ("chain", {"length": 27}, "from 1 to 26, got 27"),
    ],
)
def test_impossible_knobs_are_errors(name, knobs, message, open_):
    with pytest.raises(ValueError, match=message.replace("? ", r"\? ")):
        TASKS[name].example("train", 0, 0, **knobs)
    with pytest.raises(ValueError, match=r"knob|problem"):
        open_(f"synthetic:{name}", options=knobs, seq_len=256)


@pytest.mark.parametrize(("name", "knobs"), CASES)
def test_windows_hold_whole_examples_with_the_loss_on_the_answers(name, knobs, open_):
    dataset = open_(f"synthetic:{name}", options=knobs, seq_len=300)
    for split in ("train", "valid"):
        for x, y, ids in zip(*(t.tolist() for t in dataset.batch(split, seed=1, step=2, batch_size=4)), strict=True):
            text = dataset.tokenizer.decode([*x, y[-1] if y[-1] >= 0 else dataset.tokenizer.eos])
            lines = text.split("\n")
            assert lines.pop() == ""
            expected = []
            for line in lines:
                prompt = line[: re.search("[=?](?!.*[=?])", line).end()]
                assert line == prompt + SOLVE[name](prompt, **knobs)
                expected.append(line.removeprefix(prompt) + "\n")
            assert dataset.tokenizer.decode([token for token in y if token != -100]) == "".join(expected)
            # Every example is a document, and so is what fills the window up.
            pieces = [list(piece) for _, piece in itertools.groupby(zip(x, ids, strict=True), key=lambda pair: pair[1])]
            written = [dataset.tokenizer.decode([token for token, _ in piece]) for piece in pieces]
            assert [text.removesuffix("\n") for text in written if text] == lines
            assert written.count("") == (x[-1] == dataset.tokenizer.eos)


def test_the_prompt_counts_on_demand(open_):
    options = {"digits": 2, "loss_on_prompt": True}
    dataset = open_("synthetic:addition", options=options, seq_len=64)
    tokens, targets, _ = dataset.batch("train", seed=0, step=0, batch_size=2)
    # Six examples of ten bytes fit into 65, and the first token is nobody's target.
    assert (targets != -100).sum(1).tolist() == [59, 59]
    assert torch.equal(targets[:, :59], tokens[:, 1:60])
    masked = open_("synthetic:addition", options=options, seq_len=64, mask_boundaries=True)
    assert (masked.batch("train", seed=0, step=0, batch_size=2)[1] != -100).sum(1).tolist() == [54, 54]
    with pytest.raises(ValueError, match="loss_on_prompt must be true or false"):
        open_("synthetic:addition", options={"loss_on_prompt": "yes"})


def test_batches_of_two_steps_share_no_draw_and_validation_ignores_the_seed(open_):
    dataset = open_("synthetic:state", seq_len=64)
    rows = itertools.chain(*(dataset.batch("train", seed=0, step=step, batch_size=4)[0].tolist() for step in range(10)))
    drawn = [line for row in rows for line in dataset.tokenizer.decode(row).split()[3::4]]
    assert len(drawn) == 80
    examples = [dataset.tokenizer.decode(dataset._fill("train", 0, sample)[0]).splitlines() for sample in range(40)]
    assert len(set(itertools.chain(*examples))) == 80
    first, second = (dataset.batch("valid", seed=seed, step=0, batch_size=4)[0] for seed in (0, 1))
    assert torch.equal(first, second)


def test_an_example_longer_than_a_window_is_an_error(open_):
    with pytest.raises(
        ValueError, match=r"one example of 'synthetic:addition' takes 10 tokens but a window holds 9; raise"
    ):
        open_("synthetic:addition", seq_len=8)


def test_the_fingerprint_tells_the_knobs_apart(open_):
    two, three = (open_("synthetic:addition", options={"digits": n}, seq_len=32).fingerprint for n in (2, 3))
    assert two["options"] == {"digits": 2, "reverse": True, "loss_on_prompt": False}
    assert two["content"] != three["content"]
    assert open_("synthetic:addition").num_tokens("train") is None
    assert open_("synthetic:addition").task is TASKS["addition"]


def test_exact_match_is_the_share_of_right_answers():
    def solve(prompts):
        return [solve_addition(prompt) + "\nmore" for prompt in prompts]

    def half(prompts):
        return [text if number % 2 else "9" + text for number, text in enumerate(solve(prompts))]

    assert evaluate_exact_match("addition", solve, count=50) == 1.0
    assert evaluate_exact_match(TASKS["addition"], half, count=50, seed=3) == 0.5
    asked = []
    evaluate_exact_match("addition", lambda prompts: asked.extend(prompts) or prompts, count=300, knobs={"digits": 1})
    train = {TASKS["addition"].example("train", 0, index, digits=1).prompt for index in range(2000)}
    assert not set(asked) & train
    with pytest.raises(ValueError, match="returned 1 texts for 3 prompts"):
        evaluate_exact_match("addition", lambda prompts: [""], count=3)
