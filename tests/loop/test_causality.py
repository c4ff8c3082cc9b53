"""Leaks through every kind of part are found and named; no shipped preset has one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import looptim as lo

WIDTH, STREAMS = 8, 2


def next_token(x):
    """Each token gets what the one after it has."""
    return F.pad(x[:, 1:], (0, 0) * (x.dim() - 2) + (0, 1))


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


class Start(lo.Part):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, e):
        return lo.state.Copies(STREAMS)(self.leak(e))


class ReadOut(lo.Part):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, Y):
        return self.leak(Y.mean(-2))


class Hidden(lo.Part):
    """Its own parameters hide the leak."""

    def __init__(self, leak):
        super().__init__()
        self.leak, self.a = leak, nn.Parameter(torch.zeros(1))

    def forward(self, e):
        return lo.state.Copies(STREAMS)(e + self.a * self.leak(e))


class InTraining(lo.Part):
    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, e):
        return lo.state.Copies(STREAMS)(self.leak(e) if self.training else e)


def honest_parts():
    transition = lo.presets.operloop_transition(WIDTH, STREAMS)
    rule = transition.rule
    parts = {"projection": transition.projection, "objective": transition.objective}
    return parts | {"step": rule.step, "decay": rule.decay, "target": None, "start": None, "readout": None}


def loop_with(features=None, rule=None, **changes):
    parts = honest_parts() | changes
    rule = (rule or lo.rules.Descent)(parts["step"], parts["decay"])
    more = {} if features is None else {"features": features}
    transition = lo.Transition(parts["projection"], parts["objective"], rule, target=parts["target"], **more)
    start = parts["start"] or lo.state.Copies(STREAMS)
    return lo.Loop(transition, width=WIDTH, steps=2, start=start, readout=parts["readout"], name="mine")


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


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("part", PARTS)
def test_a_leak_is_refused_and_its_part_is_named(part, leak):
    loop = PARTS[part](LEAKS[leak])
    what = "later tokens" if leak in ("next token", "mean") else "other sequences"
    with pytest.raises(ValueError, match=f"^mine sees {what}.*: {part} gives"):
        lo.check_causality(loop)


@pytest.mark.parametrize("start", [Hidden, InTraining])
def test_a_leak_that_hides_is_found(start):
    with pytest.raises(ValueError, match="the start"):
        lo.check_causality(loop_with(start=start(next_token)))


def test_one_number_for_the_whole_batch_is_a_leak():
    with pytest.raises(ValueError, match="the step GlobalStep"):
        lo.check_causality(loop_with(step=GlobalStep()))


@pytest.mark.parametrize("name", lo.PRESETS)
def test_no_shipped_preset_leaks(name):
    assert lo.check_causality(lo.build(name, width=WIDTH, steps=3)) < 1e-9


def test_a_shift_of_the_past_is_allowed_and_known():
    loop = lo.build("full_bandwidth", width=WIDTH, steps=2, token_shift=True)
    assert lo.check_causality(loop) < 1e-9
    assert lo.mixes_tokens(loop)
    assert not lo.mixes_tokens(lo.build("full_bandwidth", width=WIDTH, steps=2))


def test_models_are_checked_with_their_blocks():
    model = lo.LoopedLM(lo.ModelConfig.tiny(), seed=0)
    assert lo.check_causality(model) < 1e-9
    model.blocks[1].attention_norm = nn.Sequential(Target(next_token), model.blocks[1].attention_norm)
    with pytest.raises(ValueError, match="LoopedLM sees later tokens: a block"):
        lo.check_causality(model)


def test_what_is_no_loop_is_refused():
    with pytest.raises(ValueError, match="takes a Loop or a model"):
        lo.check_causality(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="give vocab_size"):
        lo.check_causality(nn.Sequential(lo.build("vanilla", width=8, steps=2)))


def test_the_loop_is_left_as_it_was():
    loop = lo.build("operloop", width=WIDTH, steps=2).train()
    before = {name: value.clone() for name, value in loop.state_dict().items()}
    lo.check_causality(loop)
    assert loop.training and all(torch.equal(value, before[name]) for name, value in loop.state_dict().items())
