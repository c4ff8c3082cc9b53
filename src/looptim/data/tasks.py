"""Reasoning tasks drawn on the fly, with a held-out split that training draws cannot reach.

Every problem has a canonical form, and the hash of that form alone decides between training and held-out; draws repeat
until the split is the one asked for. The two splits are therefore disjoint for every seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import random
import string
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, final

from ..base.choices import nearest

STOP = "\n"
"""The text after every answer."""

HELD_OUT = 0.1
"""The share of problems that are held out."""

_FEWEST = 50
"""Problems below which a task is refused: too few of them would be held out."""
DRAWS = 10_000
"""Draws after which a split is taken to have no problem."""


class Example(NamedTuple):
    """A prompt and the answer that must follow; the full text is `prompt + answer + STOP`."""

    prompt: str
    answer: str


class Problem(NamedTuple):
    """An example, and the canonical form that it shares with equivalent examples."""

    canonical: str
    prompt: str
    answer: str


class Knob(NamedTuple):
    """A difficulty option: its default and its allowed values."""

    default: int | bool
    low: int = 0
    high: int = 0


@final
@dataclasses.dataclass(frozen=True)
class Task:
    """A family of problems.

    >>> TASKS["addition"].example("train", 0, 0, digits=2)
    Example(prompt='46+20=', answer='660')
    """

    name: str
    form: str
    """What an example looks like."""
    knobs: Mapping[str, Knob]
    draw: Callable[..., Problem | None]
    """Draw a problem from a random generator and the options; None if the draw is not a problem."""
    count: Callable[..., int]
    """A lower bound on the number of problems with these options."""

    def example(self, split: Literal["train", "valid"], seed: int, index: int, **knobs: Any) -> Example:
        """Example `index` of a split, as a pure function of the arguments."""
        if split not in ("train", "valid"):
            raise ValueError(f"split {split!r} must be train or valid")
        settings = self.settings(knobs)
        rng = random.Random(f"{self.name}:{split}:{seed}:{index}")
        for _ in range(DRAWS):
            problem = self.draw(rng, **settings)
            if problem is not None and split_of(problem.canonical) == split:
                return Example(problem.prompt, problem.answer)
        raise ValueError(f"task {self.name!r} has hardly any {split} problems at {settings}; choose other knobs")

    def settings(self, knobs: Mapping[str, Any]) -> dict[str, Any]:
        """The knobs with their defaults; an unknown or impossible one is an error."""
        settings = settle_knobs(self.name, self.knobs, knobs)
        if (count := self.count(**settings)) < _FEWEST:
            raise ValueError(
                f"task {self.name!r} has only {count} problems at {settings}, too few to hold some out; raise a knob "
                f"until there are {_FEWEST}"
            )
        return settings


def settle_knobs(task: str, table: Mapping[str, Knob], values: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a task with their defaults; an unknown or impossible one is an error."""
    for name, value in values.items():
        if name not in table:
            raise ValueError(f"task {task!r} has no knob {name!r}{nearest(name, table)} known: {', '.join(table)}")
        knob = table[name]
        if isinstance(knob.default, bool):
            if not isinstance(value, bool):
                raise ValueError(f"knob {name!r} of task {task!r} must be true or false, got {value!r}")
        elif type(value) is not int or not knob.low <= value <= knob.high:
            bounds = f"from {knob.low} to {knob.high}"
            raise ValueError(f"knob {name!r} of task {task!r} must be a whole number {bounds}, got {value!r}")
    return {name: values.get(name, knob.default) for name, knob in table.items()}


def split_of(canonical: str, fold: int = 0) -> Literal["train", "valid"]:
    """The split of a problem, forever and for every seed; each fold holds out other problems."""
    hash = int.from_bytes(hashlib.blake2b(canonical.encode(), digest_size=8).digest(), "big")
    return "valid" if fold * HELD_OUT * 2**64 <= hash < (fold + 1) * HELD_OUT * 2**64 else "train"


def find_task(name: str) -> Task:
    """A task by name."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}{nearest(name, TASKS)} known: {', '.join(TASKS)}")
    return TASKS[name]


def evaluate_exact_match(
    task: Task | str,
    generate: Callable[[list[str]], list[str]],
    *,
    count: int,
    seed: int = 0,
    knobs: Mapping[str, Any] | None = None,
) -> float:
    """The share of `count` held-out problems that are answered exactly.

    `generate` gets prompts of equal length and returns what follows each; only the text up to the first line end
    counts.
    """
    if count < 1:
        raise ValueError(f"count {count} must be at least 1")
    task = find_task(task) if isinstance(task, str) else task
    examples = [task.example("valid", seed, index, **(knobs or {})) for index in range(count)]
    answers = generate([example.prompt for example in examples])
    if len(answers) != count:
        raise ValueError(f"generate returned {len(answers)} texts for {count} prompts; return one for each")
    right = [text.split(STOP)[0] == example.answer for text, example in zip(answers, examples, strict=True)]
    return sum(right) / count


def _addition(rng: random.Random, *, digits: int, reverse: bool) -> Problem:
    a, b = rng.randrange(10**digits), rng.randrange(10**digits)
    answer = f"{a + b:0{digits + 1}}"
    # Training on b+a while holding out a+b would not be a test.
    canonical = f"{digits}:{min(a, b)}+{max(a, b)}"
    return Problem(canonical, f"{a:0{digits}}+{b:0{digits}}=", answer[::-1] if reverse else answer)


def _hop(rng: random.Random, *, hops: int, length: int, symbols: int) -> Problem | None:
    letters = string.ascii_lowercase[:symbols]
    text = rng.choice(letters)
    # Equal neighbors would be a place that no hop leaves.
    while len(text) < length:
        text += rng.choice(letters.replace(text[-1], ""))
    at = length - 1
    for _ in range(hops):
        found = text.rfind(text[at], 0, at)
        if found < 0:
            return None
        at = found + 1
    names: dict[str, str] = {}
    canonical = "".join(names.setdefault(letter, str(len(names)) + ".") for letter in text)
    return Problem(f"{hops}:{canonical}", f"{text}=", text[at])


def _hop_count(*, hops: int, length: int, symbols: int) -> int:
    # Every hop goes back over at least one occurrence of each of two letters.
    if length < hops + 2:
        return 0
    return symbols * (symbols - 1) ** (length - 1) // math.factorial(symbols)


def _chain(rng: random.Random, *, length: int, modulus: int) -> Problem:
    width = len(str(modulus - 1))
    names = rng.sample(string.ascii_lowercase, length)
    value = rng.randrange(modulus)
    steps, canonical = [f"{names[0]}={value:0{width}}"], [str(value)]
    for before, name in itertools.pairwise(names):
        operation = rng.choice("+-*")
        operand = rng.randrange(2 if operation == "*" else 1, modulus)
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[operation] % modulus
        steps.append(f"{name}={before}{operation}{operand:0{width}}")
        canonical.append(f"{operation}{operand}")
    return Problem(f"{modulus}:{' '.join(canonical)}", f"{' '.join(steps)} {names[-1]}?", f"{value:0{width}}")


def _state(rng: random.Random, *, length: int, items: int) -> Problem:
    state = string.digits[1 : items + 1]
    moves = []
    for _ in range(length):
        move = rng.sample(range(items), items)
        moves.append("".join(str(place + 1) for place in move))
        state = "".join(state[place] for place in move)
    return Problem(" ".join(moves), f"{' '.join(moves)}=", state)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "addition",
            "07+45=250: zero-padded, the sum one digit longer and, with `reverse`, its last digit first",
            {"digits": Knob(2, 1, 100), "reverse": Knob(True)},
            _addition,
            lambda *, digits, reverse: 10 ** (2 * digits) // 2,
        ),
        Task(
            "hop",
            "cdabacba=d: from the last letter, `hops` times: back to its previous occurrence and one to the right",
            {"hops": Knob(2, 1, 256), "length": Knob(32, 3, 4096), "symbols": Knob(4, 3, 26)},
            _hop,
            _hop_count,
        ),
        Task(
            "chain",
            "a=3 f=a+4 c=f*2 c?4: `length` assignments modulo `modulus`, each of the one before",
            {"length": Knob(4, 1, 26), "modulus": Knob(10, 3, 1000)},
            _chain,
            lambda *, length, modulus: modulus * (3 * modulus - 4) ** (length - 1),
        ),
        Task(
            "state",
            "21345 13254=23154: start with 12345, then place i gets what was at the place that digit i names",
            {"length": Knob(4, 1, 256), "items": Knob(5, 3, 9)},
            _state,
            lambda *, length, items: math.factorial(items) ** length,
        ),
    )
}
"""The tasks by name; `docs/data.md` shows an example of each."""
