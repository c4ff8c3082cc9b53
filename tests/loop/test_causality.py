"""Leaks through every kind of part are found and named; that no preset has one is in `test_contracts.py`."""

import itertools
import random
import types
from typing import ClassVar

import numpy
import pytest
import torch
import torch.nn.functional as F
from leaking import STREAMS, WIDTH, Start, honest_parts, loop_with, next_token
from torch import nn

import looptim as lo


def other_sequence(x):
    return x.roll(1, 0)


def batch_mean(x):
    return x - x.mean(0, keepdim=True)


def later_mean(x):
    return x + 0.1 * x.mean(1, keepdim=True)


LEAKS = {"next token": next_token, "other sequence": other_sequence, "batch mean": batch_mean, "mean": later_mean}


class Bias(lo.Projection):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, ctx):
        return lo.maps.Streams(torch.full_like(ctx.Y[..., 0], 0.5)), self.leak(ctx.e)


class Read(lo.Projection):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, ctx):
        return lo.maps.Streams(torch.sigmoid(self.leak(ctx.Y)[..., 0])), None


class Step(lo.Step):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, ctx, previous):
        return torch.sigmoid(self.leak(ctx.e)[..., :1]).unsqueeze(-1)


class GlobalStep(lo.Step):
    """One number for the whole batch."""

    def forward(self, ctx, previous):
        return torch.sigmoid(ctx.e.mean())


class Decay(lo.Decay):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, ctx):
        return torch.sigmoid(self.leak(ctx.Y)[..., :1])


class Target(lo.Target):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, t):
        return self.leak(t)


class Objective(lo.Objective):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def value(self, o, t):
        return -(o * self.leak(t)).sum(-1)

    def grad(self, o, t):
        return -self.leak(t)


class Rule(lo.Rule):
    def __init__(self, step, decay, leak):
        super().__init__(step, decay)
        self.leak = leak

    def forward(self, Y, G, ctx, carry):
        return Y - self.leak(G), lo.Carry(1.0, 0.0, None)


class ReadOut(lo.Part):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, Y):
        return self.leak(Y.mean(-2))


class Hidden(lo.Part):
    """Its own parameters hide the leak."""

    def __init__(self, leak, streams=STREAMS):
        super().__init__()
        self.leak, self.streams, self.a = leak, streams, nn.Parameter(torch.zeros(1))

    def forward(self, e):
        return lo.state.Copies(self.streams)(e + self.a * self.leak(e))


class InTraining(lo.Part):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, e):
        return lo.state.Copies(STREAMS)(self.leak(e) if self.training else e)


PARTS = {
    "the bias of the projection Bias": lambda leak: loop_with(projection=Bias(leak)),
    "the projection Read": lambda leak: loop_with(projection=Read(leak)),
    "the step Step": lambda leak: loop_with(step=Step(leak)),
    "the decay Decay": lambda leak: loop_with(decay=Decay(leak)),
    "the target": lambda leak: loop_with(target=Target(leak)),
    "the objective Objective": lambda leak: loop_with(objective=Objective(leak)),
    "the rule Rule": lambda leak: loop_with(rule=lambda step, decay: Rule(step, decay, leak)),
    "the read-out": lambda leak: loop_with(readout=ReadOut(leak)),
    "the start": lambda leak: loop_with(start=Start(leak)),
    "the features": lambda leak: loop_with(features=lambda Y: leak(Y).flatten(-2)),
}


def test_at_least_twelve_different_leaks_are_tried():
    assert len(PARTS) * len(LEAKS) >= 12 and len({*LEAKS.values(), *CUNNING}) >= 12


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("part", PARTS)
def test_a_leak_is_refused_and_its_part_is_named(part, leak):
    loop = PARTS[part](LEAKS[leak])
    what = "later tokens" if leak in ("next token", "mean") else "other sequences"
    with pytest.raises(ValueError, match=f"^mine sees {what}.*: {part} gives"):
        lo.check_causality(loop)


class Remembering(lo.Part):
    """Adds what it was given the last time, in an attribute."""

    last = None

    def forward(self, e):
        before, self.last = self.last, e
        return lo.state.Copies(STREAMS)(e if before is None or before.shape != e.shape else e + before)


class Running(lo.Part):
    """Subtracts a running mean, as batch normalization does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, e):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * e.detach().mean((0, 1))
        return lo.state.Copies(STREAMS)(e - self.mean)


class Counting(lo.Part):
    """Sees the future after a thousand calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, e):
        self.calls.append(1)
        return lo.state.Copies(STREAMS)(next_token(e) if len(self.calls) > 1000 else e)


class Elsewhere(lo.Part):
    """Remembers in a place of the module that nobody looks at."""

    calls = itertools.count()

    def forward(self, e):
        return lo.state.Copies(STREAMS)(e + 1e-3 * next(Elsewhere.calls))


class CountingInItsClass(lo.Part):
    calls = 0

    def forward(self, e):
        CountingInItsClass.calls += 1
        return lo.state.Copies(STREAMS)(next_token(e) if CountingInItsClass.calls > 10**6 else e)


class CountingInAnObject(lo.Part):
    def __init__(self):
        super().__init__()
        self.box = types.SimpleNamespace(calls=0)

    def forward(self, e):
        self.box.calls += 1
        return lo.state.Copies(STREAMS)(next_token(e) if self.box.calls > 10**6 else e)


class CountingInAParameter(lo.Part):
    def __init__(self):
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, e):
        self.calls.data += 1
        return lo.state.Copies(STREAMS)(next_token(e) if self.calls > 10**6 else e)


CALLS = [0]


def count_globally():
    CALLS[0] += 1
    return CALLS[0]


class CountingGlobally(lo.Part):
    def forward(self, e):
        return lo.state.Copies(STREAMS)(next_token(e) if count_globally() > 10**6 else e)


def sometimes(e):
    """In one call of three."""
    return next_token(e) if torch.rand(()) < 0.3 else e


def dropped(e):
    """Where a dropout of its own puts a zero."""
    return torch.where(torch.rand_like(e) < 0.1, next_token(e), e)


def mixed_up(e):
    """Mixup over the batch, in another order each time."""
    return 0.9 * e + 0.1 * e[torch.randperm(len(e))]


def number_of_the_batch(e):
    """A Python number, not a tensor."""
    return e * e.abs().mean().item()


def sequence_before(e):
    """The first sequence is left alone."""
    return torch.cat([e[:1], e[1:] + 0.1 * e[:-1]])


def largest_only(e):
    """Looks at the next token only where that is very large."""
    return e + (next_token(e) > 50).to(e.dtype)


def with_a_gradient(e):
    return next_token(e) if torch.is_grad_enabled() else e


def one_place(e):
    """One token of each sequence sees the next one."""
    return e + (torch.arange(e.shape[1]) == 3).to(e.dtype).unsqueeze(-1) * next_token(e)


def far_away(e):
    """The token a hundred places on."""
    return e + F.pad(e[:, 100:], (0, 0, 0, min(100, e.shape[1])))


def tiny(e):
    """As small as fp32 resolves."""
    return e + 1e-7 * next_token(e)


def in_fp32(e):
    return next_token(e) if e.dtype == torch.float32 else e


def sorted_batch(e):
    return e.sort(0).values


def ranked(e):
    """The rank of a token among all of its sequence, which has no gradient."""
    return e + e.argsort(1).to(e.dtype)


def batch_size(e):
    """How many sequences there are."""
    return e / len(e)


def padded_end(e):
    """How many tokens are still to come."""
    return e + torch.arange(e.shape[1], 0, -1).to(e.dtype).unsqueeze(-1)


def reversed_sum(e):
    return e + 0.01 * e.flip(1).cumsum(1).flip(1)


def computed_with_a_gradient(e):
    """In a training, where what comes in has a gradient."""
    return next_token(e) if e.requires_grad else e


def very_far_away(e):
    return e + F.pad(e[:, 1000:], (0, 0, 0, min(1000, e.shape[1])))


def long_sequences_only(e):
    return next_token(e) if e.shape[1] >= 2000 else e


def loud(e):
    """A token looks at the next one only where it is large itself."""
    return e + (e[..., :1] > 6).to(e.dtype) * next_token(e)


def quiet(e):
    return e + (e.abs().amax(-1, keepdim=True) < 0.05).to(e.dtype) * next_token(e)


def counted_over_the_batch(e):
    """The first hundred that are positive, in the order of the batch."""
    return e * ((e[..., 0] > 0).flatten().cumsum(0).view(e.shape[:2]) < 100).unsqueeze(-1)


CUNNING = [sometimes, dropped, mixed_up, number_of_the_batch, sequence_before, largest_only, with_a_gradient, one_place]
CUNNING += [far_away, tiny, in_fp32, sorted_batch, ranked, batch_size, padded_end, reversed_sum]
CUNNING += [computed_with_a_gradient, very_far_away, long_sequences_only, loud, quiet, counted_over_the_batch]


@pytest.mark.parametrize("leak", CUNNING, ids=lambda leak: leak.__name__)
def test_a_cunning_leak_is_found(leak):
    with pytest.raises(ValueError, match=r"^mine sees (later tokens|other sequences)"):
        lo.check_causality(loop_with(start=Start(leak)))


COUNTING = [Counting, CountingInItsClass, CountingInAnObject, CountingInAParameter, CountingGlobally]


@pytest.mark.parametrize("part", [Remembering, Running, Elsewhere, *COUNTING])
def test_what_remembers_is_found(part):
    with pytest.raises(ValueError, match=r"^mine (is not a function of its input|sees)"):
        lo.check_causality(loop_with(start=part()))


def test_randomness_of_ones_own_is_no_function_of_the_input():
    with pytest.raises(ValueError, match=r"^mine is not a function of its input: the start gives the same input"):
        lo.check_causality(loop_with(start=Start(lambda e: e * random.random())))


class Shut(lo.Part):
    """A gate that starts shut."""

    def __init__(self, gate):
        super().__init__()
        self.gate, self.a, self.b = gate, nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, e):
        return lo.state.Copies(STREAMS)(e + self.gate(self.a, self.b) * next_token(e))


GATES = {
    "opens to one side": lambda a, b: F.relu(a),
    "opens to the other": lambda a, b: F.relu(-a),
    "opens late": lambda a, b: F.relu(a - 2),
    "opens very late": lambda a, b: torch.sigmoid(a - 60),
    "opens to the other, very late": lambda a, b: torch.sigmoid(-a - 60),
    "has values on one side only": lambda a, b: torch.sqrt(a),
    "has values on the other only": lambda a, b: torch.sqrt(-a),
    "is two, one for each side": lambda a, b: F.relu(a) * F.relu(-b),
    "is two, one for each other side": lambda a, b: F.relu(-a) * F.relu(b),
    "is two for one side": lambda a, b: F.relu(a) * F.relu(b),
    "is two for the other": lambda a, b: F.relu(-a) * F.relu(-b),
}


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_that_training_may_open_is_found(gate):
    with pytest.raises(ValueError, match="sees later tokens: the start"):
        lo.check_causality(loop_with(start=Shut(GATES[gate])))


class Mean(lo.Direction):
    def forward(self, G, memory):
        return batch_mean(G), None


class Sphere(lo.rules.Retraction):
    def forward(self, Y, D, eta, lam):
        return later_mean(Y - eta * D)


class Write(lo.MapPart):
    def forward(self, ctx):
        return lo.maps.Streams(torch.sigmoid(next_token(ctx.Y)[..., 0]))


def test_parts_of_a_rule_are_named():
    with pytest.raises(ValueError, match="other sequences of its batch: the direction Mean"):
        lo.check_causality(loop_with(rule=lambda step, decay: lo.rules.Descent(step, decay, Mean())))
    with pytest.raises(ValueError, match="later tokens: the retraction Sphere"):
        lo.check_causality(loop_with(rule=lambda step, decay: lo.rules.Descent(step, decay, retract=Sphere())))


def test_a_write_map_is_named():
    parts = honest_parts()
    rule = lo.rules.Descent(parts["step"], parts["decay"])
    transition = lo.Transition(parts["projection"], parts["objective"], rule, write=Write())
    with pytest.raises(ValueError, match="later tokens: the write map Write"):
        lo.check_causality(lo.Loop(transition, width=WIDTH, steps=2, start=lo.state.Copies(STREAMS)))


def test_one_leaking_step_of_many_is_found():
    honest = [lo.presets.operloop_transition(WIDTH, STREAMS) for _ in range(3)]
    leaking = loop_with(target=Target(next_token)).transitions[0]
    with pytest.raises(ValueError, match="the target"):
        lo.check_causality(lo.Loop([*honest, leaking], width=WIDTH, start=lo.state.Copies(STREAMS)))


def past(e):
    """Token shifts, running sums and positions of the past."""
    shifted = F.pad(e[:, :-1], (0, 0, 1, 0))
    return e + shifted + 0.1 * e.cumsum(1) + torch.arange(e.shape[1]).to(e.dtype).unsqueeze(-1)


def test_the_past_may_be_seen():
    loop = loop_with(start=Start(past))
    assert lo.check_causality(loop) < 1e-9
    assert lo.mixes_tokens(loop)
    assert lo.diagnose(loop).leak is None


class Dropout(lo.Part):
    def forward(self, e):
        return lo.state.Copies(STREAMS)(F.dropout(e, 0.5, self.training))


def test_honest_randomness_is_allowed():
    assert lo.check_causality(loop_with(start=Dropout())) < 1e-9


class Tables(lo.Part):
    """Has lists of tensors, arrays, and constants that are made for each length when it is first seen."""

    made: ClassVar[dict] = {}

    def __init__(self):
        super().__init__()
        self.lists, self.array = [torch.ones(2), torch.full((3,), torch.nan)], numpy.arange(3.0)

    def forward(self, e):
        key = e.shape[1], e.dtype
        if key not in self.made:
            self.made[key] = torch.arange(e.shape[1], dtype=e.dtype).unsqueeze(-1)
        self.array = self.array.copy()
        return lo.state.Copies(STREAMS)(e + self.lists[0][0].to(e.dtype) * self.array[1] + self.made[key])


def test_tables_are_no_memory():
    assert lo.check_causality(loop_with(start=Tables())) < 1e-9


class Masked(lo.Part):
    """Attention to the past, by a matrix that is zero elsewhere."""

    def forward(self, e):
        past = torch.ones(e.shape[1], e.shape[1], dtype=e.dtype).tril()
        seen = F.scaled_dot_product_attention(e, e, e, is_causal=True)
        return lo.state.Copies(STREAMS)(e + seen + past @ e / 100)


@pytest.mark.long
def test_masks_are_causal():
    assert lo.check_causality(loop_with(start=Masked())) < 1e-9


class Keeping(lo.Part):
    """Makes a constant once and keeps it, which is no memory of an input."""

    constant = None

    def forward(self, e):
        self.constant = torch.ones_like(e[:1, :1]) if self.constant is None else self.constant
        return lo.state.Copies(STREAMS)(e + self.constant)


def test_a_constant_made_once_is_no_memory():
    assert lo.check_causality(loop_with(start=Keeping())) < 1e-9


def test_a_part_bound_to_fp32_is_told_so():
    class Bound(lo.Part):
        def forward(self, e):
            return lo.state.Copies(STREAMS)(e @ torch.eye(WIDTH))

    with pytest.raises(ValueError, match=r"does not run on 6 .* in float64 .*create tensors in the dtype"):
        lo.check_causality(loop_with(start=Bound()))


def test_diagnose_reports_the_leak_and_its_part():
    verdict = lo.diagnose(loop_with(projection=Bias(next_token)))
    assert "sees later tokens: the bias of the projection Bias" in str(verdict)
    assert verdict.aligned, "which is another question"


@pytest.mark.parametrize("start", [Hidden, InTraining])
def test_a_leak_that_hides_is_found(start):
    with pytest.raises(ValueError, match="the start"):
        lo.check_causality(loop_with(start=start(next_token)))


def test_one_number_for_the_whole_batch_is_a_leak():
    with pytest.raises(ValueError, match="the step GlobalStep"):
        lo.check_causality(loop_with(step=GlobalStep()))


def test_a_shift_of_the_past_is_allowed_and_known():
    loop = lo.build("full_bandwidth", width=WIDTH, steps=2, token_shift=True)
    assert lo.check_causality(loop) < 1e-9
    assert lo.mixes_tokens(loop)
    assert not lo.mixes_tokens(lo.build("full_bandwidth", width=WIDTH, steps=2))


@pytest.mark.long
def test_models_are_checked_with_their_blocks():
    model = lo.LoopedLM(lo.ModelConfig.tiny(), seed=0)
    assert lo.check_causality(model) < 1e-9
    hidden = lo.LoopedLM(lo.ModelConfig.tiny(), seed=0)
    hidden.loops[0].start = Hidden(next_token, streams=4)
    with pytest.raises(ValueError, match="LoopedLM sees later tokens: the start"):
        lo.check_causality(hidden)
    model.blocks[1].attention_norm = nn.Sequential(Target(next_token), model.blocks[1].attention_norm)
    with pytest.raises(ValueError, match="LoopedLM sees later tokens: a block"):
        lo.check_causality(model)


def test_what_is_no_loop_is_refused():
    with pytest.raises(ValueError, match="takes a Loop or a model"):
        lo.check_causality(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="pass vocab_size"):
        lo.check_causality(nn.Sequential(lo.build("vanilla", width=8, steps=2)))


def test_the_loop_is_left_as_it_was():
    loop = lo.build("operloop", width=WIDTH, steps=2).train()
    before = {name: value.clone() for name, value in loop.state_dict().items()}
    lo.check_causality(loop)
    assert loop.training and all(torch.equal(value, before[name]) for name, value in loop.state_dict().items())
