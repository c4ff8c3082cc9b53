"""The fused form of a transition against the readable one, in value and gradient."""

import pytest
import torch
from torch.nn.utils import parametrize

import looptim as lo
from looptim.loop import kernels
from looptim.loop.fused import form_of

WIDTH, STEPS = 16, 3
STREAMS = [name for name in lo.PRESETS if name.startswith(("hyperloop", "operloop")) and name != "operloop_bounded"]
OPTIONS = [{"objective": "inner_product"}, {"step": "sigmoid"}, {"step": "unit"}, {"shared": True}, {"streams": 1}]
CASES = [(name, {}) for name in STREAMS] + [("operloop", options) for options in OPTIONS]


def make(name, options, dtype=torch.float64):
    """A loop whose gates depend on the state."""
    loop = lo.build(name, width=WIDTH, steps=STEPS, **options).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in loop.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return loop


def run(loop, form, e, blocks):
    loop.set_form(form)
    h, state = loop(e, blocks, return_state=True)
    gradients = torch.autograd.grad(h.square().sum(), [e, *loop.parameters()])
    return [h, state.Y, torch.as_tensor(state.carry.eta), *gradients]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_value_and_gradient_are_those_of_the_readable_form(name, options, dtype, tolerance, monkeypatch):
    if name == "operloop_muon" and dtype == torch.float32:
        pytest.skip("a polar factor amplifies the rounding of nearly singular matrices in both forms")
    # Several chunks, the last of them smaller.
    monkeypatch.setattr(kernels, "CHUNK_NUMEL", 300)
    loop, blocks = make(name, options, dtype), torch.nn.Linear(WIDTH, WIDTH).to(dtype)
    assert loop.form == "fused"
    e = torch.randn(2, 7, WIDTH, dtype=dtype, requires_grad=True)
    got, expected = run(loop, "fused", e, blocks), run(loop, "readable", e, blocks)
    for g, x in zip(got, expected, strict=True):
        torch.testing.assert_close(g, x, rtol=tolerance, atol=tolerance * max(1, x.abs().max().item()))


@pytest.mark.parametrize("name", ["operloop", "hyperloop"])
def test_hand_written_derivatives_are_right_and_differentiate_twice(name):
    loop = lo.build(name, width=3, steps=1, streams=2).double()
    blocks = torch.nn.Linear(3, 3).double()
    e = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    start = torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    inputs = (e, start, *loop.parameters())
    assert torch.autograd.gradcheck(lambda e, start, *_: loop(e, blocks, start=start), inputs)
    assert torch.autograd.gradgradcheck(lambda e, start, *_: loop(e, blocks, start=start), inputs)


def test_a_bf16_state_is_rounded_once():
    loop = make("operloop", {}, torch.float32)
    e = torch.randn(2, 7, WIDTH).bfloat16()
    fused = loop(e, torch.tanh)
    loop.set_form("readable")
    readable = loop(e, torch.tanh)
    assert fused.dtype == torch.bfloat16
    assert (fused.float() - readable.float()).norm() < 2**-8 * readable.float().norm()


@pytest.mark.long
def test_compiled_kernels_serve_all_steps_with_one_compilation():
    loop, blocks = make("operloop", {}, torch.float64), torch.nn.Linear(WIDTH, WIDTH).double()
    e = torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = run(loop, "readable", e, blocks)
    torch._dynamo.reset()
    got = run(loop, "compiled", e, blocks)
    assert loop.form == "compiled"
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"]


class OwnStep(lo.controls.Step):
    def forward(self, ctx, previous):
        return 0.5


def test_a_users_part_leaves_a_transition_readable_and_says_so():
    transition = lo.build("operloop", width=WIDTH, steps=1).transitions[0]
    transition.rule = lo.rules.GradientDescent(OwnStep(), transition.rule.decay)
    assert form_of(transition) == "readable, for the step OwnStep"
    assert "BoundedRead" in lo.build("operloop_bounded", width=WIDTH, steps=2).form
    loop = lo.Loop(transition, width=WIDTH, steps=2, start=lo.state.Copies(4))
    assert loop(torch.randn(1, 2, WIDTH), torch.tanh).isfinite().all()


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="form"):
        lo.build("operloop", width=WIDTH, steps=2).set_form("fast")


def saved_words(form, width=256, tokens=8, steps=4):
    """What the backward keeps, in words of d per token and step."""
    loop = lo.build("operloop", width=width, steps=steps)
    loop.set_form(form)
    e = torch.randn(1, tokens, width, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        h = loop(e, lambda o: 2 * o)
    assert h.requires_grad
    parameters = sum(parameter.numel() for parameter in loop.parameters())
    return (sum(kept.values()) / 4 - parameters) / (tokens * width * steps)


def test_what_is_saved_is_the_state_and_one_vector():
    assert saved_words("fused") < 5.4
    assert saved_words("readable") > 9


class Half(torch.nn.Module):
    def forward(self, x):
        return x / 2


ADDED = {
    "a hook of the gate": lambda t: t.rule.step.gate.register_forward_hook(lambda module, given, out: out / 2),
    "a hook of the step": lambda t: t.rule.step.register_forward_hook(lambda module, given, out: out / 2),
    "a hook of the rule": lambda t: t.rule.register_forward_hook(lambda module, given, out: (out[0] / 2, out[1])),
    "a hook before the rule": lambda t: t.rule.register_forward_pre_hook(lambda module, x: (x[0], x[1] / 2, *x[2:])),
    "a forward of its own": lambda t: setattr(t.rule.step, "forward", lambda ctx, previous: 0.1),
    "a parametrization": lambda t: parametrize.register_parametrization(t.rule.step.gate, "W", Half()),
}


@pytest.mark.parametrize("added", ADDED)
def test_what_is_added_to_a_known_part_is_run(added):
    loop, e = lo.build("operloop", width=8, steps=3, streams=4), torch.randn(2, 5, 8)
    before = loop(e, torch.tanh)
    ADDED[added](loop.transitions[0])
    out, form = loop(e, torch.tanh), loop.form
    loop.set_form("readable")
    assert form.startswith("readable, for") and torch.allclose(out, loop(e, torch.tanh), atol=1e-5)
    assert not torch.equal(out, before)
