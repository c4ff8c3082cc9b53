"""Small loops with one part of a test's choice, for tests of what a token may see."""

import torch.nn.functional as F

import looptim as lo

WIDTH, STREAMS = 8, 2


def next_token(x):
    """Each token gets what the one after it has."""
    return F.pad(x[:, 1:], (0, 0) * (x.dim() - 2) + (0, 1))


def honest_parts():
    transition = lo.presets.operloop_transition(WIDTH, STREAMS)
    rule = transition.rule
    parts = {"projection": transition.projection, "objective": transition.objective}
    return parts | {"step": rule.step, "decay": rule.decay, "target": None, "start": None, "readout": None}


def loop_with(features=None, rule=None, **changes):
    """A loop named `mine` of OperLoop's parts, but for those that are given."""
    parts = honest_parts() | changes
    rule = (rule or lo.rules.Descent)(parts["step"], parts["decay"])
    more = {} if features is None else {"features": features}
    transition = lo.Transition(parts["projection"], parts["objective"], rule, target=parts["target"], **more)
    start = parts["start"] or lo.state.Copies(STREAMS)
    return lo.Loop(transition, width=WIDTH, steps=2, start=start, readout=parts["readout"], name="mine")


class Start(lo.Part):
    """Begins with what a function makes of the input."""

    def __init__(self, leak):
        super().__init__()
        self.leak = leak

    def forward(self, e):
        return lo.state.Copies(STREAMS)(self.leak(e))
