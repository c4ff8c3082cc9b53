"""describe, diagnose, align, check_gradient and trace, on presets and on loops a user wrote."""

import pytest
import torch
from torch import nn

import looptim as lo

WIDTH = 8


class Scaled(lo.Projection):
    """A user's projection: o = a * y + e, with a learned diagonal."""

    symbol, map_symbol = "a ⊙ y + e", "Diag(a)"

    def __init__(self, width):
        super().__init__()
        self.a = nn.Parameter(torch.ones(width))

    def forward(self, ctx):
        return lo.maps.Diagonal(self.a), ctx.e


class WrongAdjoint(lo.Map):
    def read(self, Y):
        return 2 * Y.squeeze(-2)

    def write(self, g):
        return 3 * g.unsqueeze(-2)


class WrongProjection(lo.Projection):
    def forward(self, ctx):
        return WrongAdjoint(), None


class WrongObjective(lo.Objective):
    def value(self, o, t):
        return 0.5 * (o - t).square().sum(-1)

    def grad(self, o, t):
        return 2 * (o - t)


class WrongShape(lo.MapPart):
    def forward(self, ctx):
        return lo.maps.Streams(torch.ones(*ctx.e.shape[:2], 3))


def user_loop(projection=None, objective=None, **options):
    return lo.Loop(
        lo.Transition(
            projection or Scaled(WIDTH),
            objective or lo.objectives.Delta(),
            lo.rules.GradientDescent(lo.controls.ConstantStep(0.5), lo.controls.ConstantDecay(0.1)),
            **options,
        ),
        width=WIDTH,
        steps=2,
    )


def test_a_users_loop_is_described_and_checked_like_any_other():
    loop = user_loop()
    row = lo.describe(loop)
    assert (row.name, row.projection, row.step, row.decay, row.input_map) == (
        "custom",
        "a ⊙ y + e",
        "0.5",
        "0.1",
        "Diag(a)",
    )
    assert row.aligned
    assert not row.loop_specific
    assert row.parameters == WIDTH
    assert lo.check_gradient(loop) < 1e-12


def test_a_part_without_a_symbol_goes_by_its_class():
    assert lo.describe(user_loop(WrongProjection())).projection == "WrongProjection"


def test_a_wrong_adjoint_is_found_by_the_dot_product_test():
    verdict = lo.diagnose(user_loop(WrongProjection()))
    assert not verdict.aligned
    assert verdict.adjoint_error > 0.01
    assert "not the adjoint" in str(verdict)


def test_a_wrong_derivative_is_found_by_check_gradient():
    with pytest.raises(ValueError, match="`grad` of WrongObjective is not the derivative of its `value`"):
        lo.check_gradient(user_loop(objective=WrongObjective()))


class Wrongly(lo.Projection):
    """Returns what it is told to."""

    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, ctx):
        return self.give(ctx)


@pytest.mark.parametrize(
    ("give", "sentence"),
    [
        (lambda ctx: ctx.e, "the projection Wrongly gave a Tensor; its forward must return the map"),
        (lambda ctx: lo.maps.Identity(), "gave a Identity; its forward must return the map `H` and the bias `b`"),
        (lambda ctx: (ctx.e, None), "gave a tuple of Tensor, NoneType"),
        (lambda ctx: None, "gave a NoneType"),
        (lambda ctx: (lo.maps.Identity(), ctx.Y), "the bias of the projection Wrongly gave a tensor of shape"),
    ],
)
def test_what_a_projection_gives_is_checked_with_a_sentence(give, sentence):
    with pytest.raises(ValueError, match=sentence):
        user_loop(Wrongly(give))(torch.randn(2, 5, WIDTH), torch.tanh)


class Uphill(lo.Objective):
    def value(self, o, t):
        return 0.5 * (o - t).square().sum(-1)

    def grad(self, o, t):
        return t - o


def test_a_wrong_sign_is_found_by_diagnose():
    verdict = lo.diagnose(user_loop(objective=Uphill()))
    assert not verdict.aligned
    assert "`grad` of Uphill is not the derivative of its `value`, it has the wrong sign" in str(verdict)


class Uprule(lo.Rule):
    def forward(self, Y, G, ctx, carry):
        return Y + 0.1 * G, lo.Carry(0.1, 0.0, None)


def loop_by(rule):
    return lo.Loop(lo.Transition(Scaled(WIDTH), lo.objectives.Delta(), rule), width=WIDTH, steps=2, name="mine")


def test_a_rule_that_goes_up_is_found():
    loop = loop_by(Uprule(lo.controls.ConstantStep(), lo.controls.ConstantDecay()))
    verdict = lo.diagnose(loop)
    assert not verdict.aligned
    assert str(verdict) == "mine: the rule Uprule adds the gradient, which has the wrong sign; correct it."
    with pytest.raises(ValueError, match="is not the gradient step of its local objective: the rule Uprule adds"):
        lo.check_gradient(loop)


class Gives(lo.Step):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, ctx, previous):
        return self.value


class ReturnsTheState(lo.Rule):
    def forward(self, Y, G, ctx, carry):
        return Y - G


class Number(lo.Projection):
    def forward(self, ctx):
        return lo.maps.Identity(), 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: loop_by(lo.rules.GradientDescent(Gives(None), lo.controls.ConstantDecay())),
            "the step Gives gave None",
        ),
        (
            lambda: loop_by(lo.rules.GradientDescent(Gives(torch.ones(3, 7)), lo.controls.ConstantDecay())),
            r"the step Gives gave a tensor of shape \(3, 7\); it must fit the state \(2, 5, 1, 8\)",
        ),
        (
            lambda: loop_by(ReturnsTheState(lo.controls.ConstantStep(), lo.controls.ConstantDecay())),
            "the rule ReturnsTheState gave a Tensor; it must return the next state and a Carry",
        ),
        (lambda: user_loop(Number()), "the bias of the projection Number is a int, not a tensor or None"),
    ],
)
def test_what_a_part_must_not_give_is_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        lo.diagnose(make())


def test_a_preset_that_returns_nothing_is_told_so(monkeypatch):
    monkeypatch.setitem(lo.PRESETS, "nothing", lambda width, steps: None)
    with pytest.raises(ValueError, match="what the preset nothing returns must be a looptim Loop, got NoneType"):
        lo.build("nothing", width=8, steps=2)


def test_an_identity_at_initialization_does_not_hide_a_mismatch():
    loop = user_loop(write=lo.presets.IdentityWrite())
    verdict = lo.diagnose(loop)
    assert not verdict.aligned
    assert verdict.hidden
    assert verdict.gap > 0.1
    assert "agree at these parameters" in str(verdict)
    with pytest.raises(ValueError, match="not the gradient step"):
        lo.check_gradient(loop)


def test_the_verdict_is_one_sentence_with_what_to_do():
    mismatch = str(lo.diagnose(lo.build("hyperloop", width=WIDTH, steps=2)))
    assert mismatch.startswith("hyperloop: mismatch; it reads through H_pre but writes through H_post")
    assert "looptim.align(loop)" in mismatch
    assert "\n" not in mismatch


def test_diagnose_leaves_the_loop_untouched():
    loop = lo.build("hyperloop", width=WIDTH, steps=2)
    before = {name: p.clone() for name, p in loop.state_dict().items()}
    lo.diagnose(loop)
    lo.check_gradient(lo.align(loop))
    assert loop.training
    assert all(torch.equal(p, before[name]) for name, p in loop.state_dict().items())


def test_a_loop_of_another_dtype_can_be_diagnosed():
    loop = lo.build("hyperloop", width=WIDTH, steps=2).bfloat16()
    assert lo.diagnose(loop).gap > 0.1
    assert lo.check_gradient(lo.align(loop)) < 1e-12


@pytest.mark.parametrize("name", ["parcae", "hyperloop", "full_bandwidth", "recurrentgpt"])
def test_align_drops_the_write_and_keeps_the_modules(name):
    loop = lo.build(name, width=WIDTH, steps=2)
    aligned = lo.align(loop)
    assert lo.diagnose(aligned).aligned
    assert aligned.name == f"{name}_aligned"
    kept = {id(p) for p in loop.parameters()}
    assert all(id(p) in kept for p in aligned.parameters())
    for before, after in zip(loop.transitions, aligned.transitions, strict=True):
        assert after.projection is before.projection
        assert after.rule is before.rule
        assert after.write is None
        assert before.write is not None


def test_align_returns_an_aligned_loop_as_it_is():
    loop = lo.build("operloop", width=WIDTH, steps=2)
    assert lo.align(loop) is loop


def test_align_keeps_the_mode():
    assert not lo.align(lo.build("hyperloop", width=WIDTH, steps=2).eval()).training


def test_a_loop_without_values_cannot_be_asked():
    with torch.device("meta"):
        loop = lo.build("hyperloop", width=WIDTH, steps=2)
        assert lo.diagnose(lo.build("vanilla", width=WIDTH, steps=2)).aligned, "which has no parameters"
    for ask in (lo.diagnose, lo.describe, lo.check_gradient):
        with pytest.raises(ValueError, match="hyperloop is on the meta device and has no values"):
            ask(loop)


def test_the_letters_of_a_rule_are_explained():
    assert "β = 0.5" in lo.describe(lo.build("operloop_heavyball", width=WIDTH, steps=2)).where


def test_only_a_module_can_be_traced():
    with pytest.raises(ValueError, match="trace takes a module, got str"), lo.trace("x"):
        pass


def test_a_token_shift_cannot_be_aligned():
    loop = lo.build("full_bandwidth", width=WIDTH, steps=2, token_shift=True)
    assert "earlier tokens" in str(lo.diagnose(loop))
    with pytest.raises(ValueError, match="earlier tokens"):
        lo.align(loop)
    with pytest.raises(ValueError, match="earlier tokens"):
        lo.build("full_bandwidth_aligned", width=WIDTH, steps=2, token_shift=True)


def test_vanilla_names_the_models_of_its_row():
    summary = lo.describe(lo.build("vanilla", width=WIDTH, steps=2)).summary
    for model in ("Universal Transformers", "MoEUT", "Recursive Transformers", "Ouro"):
        assert model in summary


def test_trace_records_every_step():
    loop = lo.build("operloop", width=WIDTH, steps=3)
    e, blocks = torch.randn(2, 5, WIDTH), nn.Linear(WIDTH, WIDTH)
    with lo.trace(loop) as trace:
        out = loop(e, blocks)
    assert torch.equal(trace.state[-1].mean(-2), out)
    assert len(trace.state) == 4
    for entries in (trace.read, trace.target, trace.step_size, trace.decay, trace.input_map, trace.objective):
        assert len(entries) == 3
    for step, transition in enumerate(loop.transitions):
        o = trace.input_map[step].read(trace.state[step])
        torch.testing.assert_close(trace.read[step], o)
        torch.testing.assert_close(trace.target[step], blocks(o) + transition.target.bias)
        torch.testing.assert_close(trace.objective[step], 0.5 * (trace.target[step] - o).square().sum(-1))
    assert all(a.gt(b).all() for a, b in zip(trace.step_size, trace.step_size[1:], strict=False))


def test_trace_finds_loops_inside_a_model_and_leaves_nothing_behind():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = lo.build("vanilla", width=WIDTH, steps=2)
            self.second = lo.build("hyperloop", width=WIDTH, steps=3)

        def forward(self, e):
            return self.second(self.first(e, torch.tanh), torch.tanh)

    model, e = Model(), torch.randn(1, 2, WIDTH)
    with lo.trace(model) as trace:
        model(e)
    assert len(trace.read) == 5
    assert len(trace.state) == 7
    model(e)
    assert len(trace.read) == 5
    assert not model.first._forward_pre_hooks


def test_trace_sees_through_torch_compile():
    loop = lo.build("operloop", width=WIDTH, steps=2)
    compiled = torch.compile(loop, backend="eager")
    e = torch.randn(1, 2, WIDTH)
    compiled(e, torch.tanh)
    with lo.trace(loop) as trace:
        compiled(e, torch.tanh)
    assert len(trace.read) == 2


def test_there_must_be_a_loop_to_trace():
    with pytest.raises(ValueError, match=r"no looptim\.Loop inside this Linear"), lo.trace(nn.Linear(2, 2)):
        pass


def test_a_write_map_that_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"the write map Streams gave .*\(1, 2, 3, 8\), but the state is \(1, 2, 1, 8\)"
    ):
        user_loop(write=WrongShape())(torch.randn(1, 2, WIDTH), torch.tanh)


class Root(lo.Projection):
    """A map that a large random change of its parameter makes NaN."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((WIDTH,), 0.01))

    def forward(self, ctx):
        return lo.maps.Diagonal(self.w.sqrt()), None


def test_parameters_with_bounds_do_not_make_a_mismatch_pass():
    assert lo.diagnose(user_loop(Root())).aligned
    assert not lo.diagnose(user_loop(Root(), write=lo.presets.IdentityWrite())).aligned
    assert lo.check_gradient(user_loop(Root())) < 1e-12


def test_a_loop_that_gives_nan_is_said_to():
    with pytest.raises(ValueError, match="gives values that are not finite"):
        lo.diagnose(lo.build("operloop", width=WIDTH, steps=2, scale=float("nan")))


def test_the_offending_step_of_a_list_is_named():
    aligned, mismatched = lo.build("vanilla", width=WIDTH, steps=1), user_loop(write=lo.presets.IdentityWrite())
    loop = lo.Loop([aligned.transitions[0], mismatched.transitions[0]], width=WIDTH, name="mixed")
    assert "reads through Diag(a) but writes through I" in str(lo.diagnose(loop))
    assert lo.describe(loop).projection == "y | a ⊙ y + e"
    assert lo.diagnose(lo.align(loop)).aligned


def test_a_list_may_repeat_a_transition():
    transition = user_loop(write=lo.presets.IdentityWrite()).transitions[0]
    aligned = lo.align(lo.Loop([transition, transition], width=WIDTH))
    assert aligned.steps == 2
    assert lo.diagnose(aligned).aligned


def test_an_adjoint_that_writes_to_the_past_is_measured():
    class Sum(lo.Projection):
        def forward(self, ctx):
            return lo.maps.Pullback(lambda Y: Y.squeeze(-2).cumsum(1), ctx.Y), None

    assert not lo.diagnose(user_loop(Sum())).causal
    assert lo.diagnose(user_loop()).causal


def test_traces_can_be_nested():
    loop = lo.build("operloop", width=WIDTH, steps=3)
    with lo.trace(loop) as outer, lo.trace(loop) as inner:
        loop(torch.randn(1, 2, WIDTH), torch.tanh)
    assert len(outer.read) == len(inner.read) == 3
