"""What a part could remember is looked at wherever Python keeps it, and what it makes once is no memory."""

import contextvars
import functools
import os
import random
import sys

import numpy
import pytest
import torch
from leaking import STREAMS, WIDTH, Start, loop_with, next_token
from torch import nn

import looptim as lo

MANY = 10**6
"""Calls after which the parts below begin to see the future."""
COUNTS = [0]


def count(box=COUNTS):
    box[0] += 1
    return box[0]


def count_by_a_default(box=[0]):  # noqa: B006
    return count(box)


def count_by_an_attribute():
    count_by_an_attribute.calls = getattr(count_by_an_attribute, "calls", 0) + 1
    return count_by_an_attribute.calls


def count_in_a_module():
    sys.looptim_calls = getattr(sys, "looptim_calls", 0) + 1
    return sys.looptim_calls


@functools.cache
def remember(number):
    return number


def count_in_a_cache():
    remember(remember.cache_info().misses)
    return remember.cache_info().misses


class Slots:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls


class Hidden:
    """Counts in the weights of a module that no module has."""

    def __init__(self):
        self.modules = [nn.Linear(1, 1)]

    def __call__(self):
        with torch.no_grad():
            self.modules[0].weight += 1
        return self.modules[0].weight


def count_in_the_environment():
    os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)
    return int(os.environ["CALLS"])


def count_in_a_class_of_looptim():
    lo.Part.calls = getattr(lo.Part, "calls", 0) + 1
    return lo.Part.calls


CONTEXT, BYTES = contextvars.ContextVar("calls", default=0), memoryview(bytearray(8))


def count_in_a_context():
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


def count_in_bytes():
    BYTES[0] = (BYTES[0] + 1) % 256
    return MANY * (BYTES[0] == 255) * BYTES[1]


NUMBERS, DRAWN, NUMBER = iter(range(2 * MANY)), random.Random(0), torch.Generator()
COUNTERS = {
    "default": count_by_a_default,
    "attribute of a function": count_by_an_attribute,
    "variable of another's module": count_in_a_module,
    "cache": count_in_a_cache,
    "object with slots": Slots(),
    "hidden module": Hidden(),
    "partial": functools.partial(count, [0]),
    "iterator": lambda: next(NUMBERS),
    "generator": lambda made=(n for n in range(2 * MANY)): next(made),
    "Python's random numbers": lambda: DRAWN.random() < 1e-5 and MANY + 1,
    "environment": count_in_the_environment,
    "class of looptim": count_in_a_class_of_looptim,
    "context": count_in_a_context,
    "bytes": count_in_bytes,
    "everybody's random numbers": lambda: random.random() < 1e-6 and MANY + 1,
    "numpy's random numbers": lambda: numpy.random.rand() < 1e-6 and MANY + 1,
    "torch's random numbers": lambda: torch.rand((), generator=NUMBER) < 1e-7 and MANY + 1,
}


@pytest.mark.parametrize("counter", COUNTERS)
def test_a_part_that_counts_its_calls_is_found(counter, monkeypatch):
    monkeypatch.setenv("CALLS", "0")
    monkeypatch.setattr(lo.Part, "calls", 0, raising=False)
    calls = COUNTERS[counter]
    with pytest.raises(ValueError, match=r"^mine is not a function of its input: .*which remembers earlier calls"):
        lo.check_causality(loop_with(start=Start(lambda e: next_token(e) if calls() > MANY else e)))


class Named(lo.Part):
    """Has an attribute with the name of what its functions use."""

    def __init__(self, other=None):
        super().__init__()
        self.other, self.box = other, (0,)
        box = [0]

        def number(given):
            box[0] += 1
            return next_token(given) if box[0] > MANY else given

        self.counted = number
        box = self.box if other is None else box

    def forward(self, e):
        return lo.state.Copies(STREAMS)(self.counted(e))


def test_things_of_one_name_are_told_apart():
    """One part of a class remembers and is not the last; its list has the name of an attribute, which never changes."""
    with pytest.raises(ValueError, match=r"^mine is not a function of its input: Named\.box, which remembers"):
        lo.check_causality(loop_with(start=Named(Named())))


class ByMethod(lo.Part):
    def forward(self, e):
        return lo.state.Copies(STREAMS)(next_token(e) if self.calls() > MANY else e)

    def calls(self):
        return count()


class Reversed(lo.Part):
    """Remembers when a gradient has passed."""

    def __init__(self):
        super().__init__()
        self.passed = 0
        self.register_full_backward_hook(self.see)

    def see(self, *gradients):
        self.passed += 1

    def forward(self, e):
        return lo.state.Copies(STREAMS)(next_token(e) if self.passed > MANY else e)


class Opened(lo.Part):
    """Sees the future once a gradient has passed."""

    passed = False

    def see(self, gradient):
        self.passed = True

    def forward(self, e):
        if e.requires_grad:
            e.register_hook(self.see)
        return lo.state.Copies(STREAMS)(next_token(e) if self.passed else e)


class Accumulated(lo.Part):
    """Sees the future while a gradient waits for an update."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))

    def forward(self, e):
        return lo.state.Copies(STREAMS)(self.a * (e if self.a.grad is None else next_token(e)))


@pytest.mark.parametrize("part", [ByMethod, Reversed, Opened, Accumulated])
def test_methods_and_the_backward_pass_are_looked_at(part):
    with pytest.raises(ValueError, match=r"^mine is not a function of its input"):
        lo.check_causality(loop_with(start=part()))


class Gate(lo.Part):
    """A gate that starts closed."""

    def __init__(self, hold):
        super().__init__()
        self.a, self.inner = nn.Parameter(torch.zeros(())), nn.Identity()
        a = self.a
        if hold == "closure":
            self.inner.register_forward_hook(lambda module, given, out: out + a * next_token(out))
        elif hold == "self":
            self.inner.register_forward_hook(lambda module, given, out: out + self.a * next_token(out))

    def forward(self, e):
        return lo.state.Copies(STREAMS)(self.inner(e))


@pytest.mark.parametrize("hold", ["closure", "self"])
def test_a_parameter_that_a_function_holds_cannot_be_checked(hold):
    with pytest.raises(ValueError, match=r"^mine computes with start\.a by a function or a hook that holds it"):
        lo.check_causality(loop_with(start=Gate(hold)))


def test_a_hook_that_reads_its_own_module_is_allowed():
    gate = Gate("nothing")
    gate.register_forward_pre_hook(lambda module, given: (given[0] * (1 + module.a),))
    assert lo.check_causality(loop_with(start=gate)) < 1e-9


def test_what_cannot_be_copied_is_told_so():
    part = Start(lambda e: e)
    part.numbers = (n for n in range(3))
    with pytest.raises(ValueError, match=r"^mine cannot be copied \(cannot pickle 'generator' object\)"):
        lo.check_causality(loop_with(start=part))


@functools.cache
def ramp(tokens, dtype):
    return torch.arange(tokens, dtype=dtype).unsqueeze(-1)


def test_a_cache_of_tables_is_no_memory():
    assert lo.check_causality(loop_with(start=Start(lambda e: e + ramp(e.shape[1], e.dtype)))) < 1e-9


def test_a_part_that_talks_to_other_processes_is_refused():
    def summed(e):
        if torch.distributed.is_initialized():
            e = e.clone()
            torch.distributed.all_reduce(e)
        return e

    loop = loop_with(start=Start(summed))
    assert lo.check_causality(loop) < 1e-9
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"^mine talks to other processes \(allreduce_"):
            lo.check_causality(loop)
        assert lo.check_causality(lo.build("operloop", width=WIDTH, steps=2)) < 1e-9
    finally:
        torch.distributed.destroy_process_group()
