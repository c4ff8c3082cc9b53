"""Objectives against autograd, rules against their definitions."""

import pytest
import torch

import looptim as lo
from looptim.base.numerics import polar
from looptim.loop import controls, directions, objectives, rules

OBJECTIVES = {
    "inner product": objectives.InnerProduct(),
    "normalized inner product": objectives.NormalizedInnerProduct(),
    "delta": objectives.Delta(),
    "pseudo-Huber": objectives.PseudoHuber(0.7),
}


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_grad_is_the_derivative_of_value(name):
    objective = OBJECTIVES[name]
    o, t = normal(2, 3, 5).requires_grad_(), normal(2, 3, 5)
    value = objective.value(o, t)
    assert value.shape == (2, 3)
    torch.testing.assert_close(objective.grad(o, t), torch.autograd.grad(value.sum(), o)[0])


def test_robust_objective_is_delta_near_and_bounded_far():
    robust, delta, t = objectives.PseudoHuber(1.0), objectives.Delta(), torch.zeros(1, 1, 64)
    near, far = 1e-3 * torch.randn(1, 1, 64), 1e6 * torch.randn(1, 1, 64)
    torch.testing.assert_close(robust.grad(near, t), delta.grad(near, t), rtol=1e-4, atol=1e-8)
    assert robust.grad(far, t).square().mean().sqrt().item() == pytest.approx(1.0, rel=1e-3)


def steps_of(rule, gradients, Y):
    carry = rule.init(Y)
    for G in gradients:
        Y, carry = rule(Y, G, lo.Context(Y, None, None), carry)
    return Y


def constant(rule, eta=0.1, lam=0.3, **options):
    return rule(controls.ConstantStep(eta), controls.ConstantDecay(lam), **options)


@pytest.mark.parametrize(("rule", "nesterov"), [(rules.HeavyBall, False), (rules.Nesterov, True)])
def test_momentum_equals_torch_sgd(rule, nesterov):
    """torch's SGD with momentum and the same gradients; weight decay apart, which torch folds into the gradient."""
    Y, gradients = normal(1, 1, 3, 4), [normal(1, 1, 3, 4) for _ in range(4)]
    parameter = torch.nn.Parameter(Y.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov)
    for G in gradients:
        parameter.grad = G.clone()
        optimizer.step()
    torch.testing.assert_close(steps_of(constant(rule, lam=0.0, beta=0.9), gradients, Y), parameter.data)


def test_decay_is_decoupled_from_momentum():
    Y, G = normal(1, 1, 3, 4), torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(steps_of(constant(rules.HeavyBall), [G, G], Y), (1 - 0.1 * 0.3) ** 2 * Y)


def test_polar_is_the_svds_polar_factor():
    M = normal(7, 4, 32)
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    torch.testing.assert_close(polar(M), U @ Vh, rtol=0, atol=0.01)


def test_muon_gives_equal_singular_values_at_the_momentums_size():
    M = normal(2, 3, 4, 32)
    direction, _ = directions.Polar()(M, None)
    values = torch.linalg.svdvals(direction)
    torch.testing.assert_close(values, values.mean(-1, keepdim=True).expand_as(values), rtol=0.01, atol=0)
    torch.testing.assert_close(direction.flatten(-2).norm(dim=-1), M.flatten(-2).norm(dim=-1))


def test_muons_first_step_is_heavy_balls_since_the_gradient_has_rank_one():
    Y, G = normal(1, 1, 4, 32), normal(1, 1, 4, 1) * normal(1, 1, 1, 32)
    torch.testing.assert_close(
        steps_of(constant(rules.Muon), [G], Y), steps_of(constant(rules.HeavyBall), [G], Y), rtol=1e-6, atol=1e-6
    )


def test_hyperball_keeps_the_norm_and_turns_towards_the_gradient():
    Y, G = normal(2, 3, 4, 8), normal(2, 3, 4, 8)
    after = steps_of(rules.Hyperball(controls.ConstantStep(0.1)), [G], Y)
    norm = torch.linalg.matrix_norm
    torch.testing.assert_close(norm(after), norm(Y))
    assert ((after - Y) * G).sum() < 0


def test_adam_equals_torchs():
    """torch's epsilon stands outside of the root; both are too small here to be seen."""
    Y, gradients = normal(1, 1, 3, 4), [normal(1, 1, 3, 4) for _ in range(4)]
    parameter = torch.nn.Parameter(Y.clone())
    optimizer = torch.optim.Adam([parameter], lr=0.1, betas=(0.5, 0.9), eps=1e-12)
    for G in gradients:
        parameter.grad = G.clone()
        optimizer.step()
    rule = rules.Descent(controls.ConstantStep(0.1), controls.ConstantDecay(0.0), directions.Adam(eps=1e-12))
    torch.testing.assert_close(steps_of(rule, gradients, Y), parameter.data)


def test_a_chain_is_its_directions_one_after_the_other():
    adam, momentum = directions.Adam(), directions.Momentum(0.3)
    rule = rules.Descent(controls.ConstantStep(0.1), controls.ConstantDecay(0.0), adam, momentum, directions.Polar())
    Y, gradients = normal(1, 1, 3, 4), [normal(1, 1, 3, 4) for _ in range(3)]
    expected, seen, M = Y, adam.init(Y), momentum.init(Y)
    for G in gradients:
        D, seen = adam(G, seen)
        M = 0.3 * M + D
        expected = expected - 0.1 * directions.Polar()(M, None)[0]
    torch.testing.assert_close(steps_of(rule, gradients, Y), expected)


CHAINS = {
    "adam": lambda: (directions.Adam(),),
    "adam and polar": lambda: (directions.Adam(), directions.Polar()),
    "polar and nesterov": lambda: (directions.Polar(), directions.Nesterov()),
}


@pytest.mark.parametrize("retract", [None, rules.Sphere()])
@pytest.mark.parametrize("name", CHAINS)
def test_any_chain_is_a_rule_of_the_gradient_and_waits_for_its_sequence(name, retract):
    def rule(step, decay):
        return rules.Descent(step, decay, *CHAINS[name](), retract=retract)

    transition = lo.presets.operloop_transition(8, 2, rule=rule)
    loop = lo.Loop(transition, width=8, steps=3, start=lo.state.Copies(2)).double()
    assert lo.check_gradient(loop) < 1e-9
    assert lo.diagnose(loop).aligned
    e = normal(2, 3, 8).requires_grad_()
    ragged = loop(e, torch.tanh, depth=lo.depth.PerSequence([1, 3]))
    alone = torch.cat([loop(e[i : i + 1], torch.tanh, depth=lo.depth.Fixed(n)) for i, n in enumerate([1, 3])])
    torch.testing.assert_close(ragged, alone)
    (gradient,) = torch.autograd.grad(ragged.sum(), e)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0


def test_a_chain_writes_down_its_equation():
    rule = rules.Descent(controls.ConstantStep(), controls.ConstantDecay(), directions.Momentum(), directions.Polar())
    assert rule.symbol == "M′ = βM + G, Y′ = (1 − ηλ) Y − η ‖M′‖ polar(M′)/‖polar(M′)‖"
    assert rule.name == "momentum, polar"
    assert constant(rules.HeavyBall).symbol == "M′ = βM + G, Y′ = (1 − ηλ) Y − η M′"


@pytest.mark.parametrize(
    "make",
    [
        lambda: directions.Adam((0.5, 1.0)),
        lambda: directions.Adam(eps=0.0),
        lambda: rules.Descent(controls.ConstantStep(), controls.ConstantDecay(), torch.nn.Identity()),
        lambda: lo.build("hyperloop", width=8, steps=2, keep_init=1.5),
        lambda: lo.build("parcae", width=8, steps=2, keep_init=0.0),
        lambda: lo.state.Copies(0),
        lambda: lo.state.Noise(4, std=-1),
        lambda: objectives.PseudoHuber(0),
        lambda: constant(rules.HeavyBall, beta=1.0),
        lambda: controls.NormStep(2.0),
        lambda: lo.projections.Concat(4, noise=-1),
        lambda: lo.build("operloop", width=8, steps=2, decay_init=1.0),
        lambda: lo.build("operloop_bounded", width=8, steps=2, bound=0.0),
    ],
)
def test_values_out_of_range_are_refused_with_what_was_given(make):
    with pytest.raises(ValueError, match="must"):
        make()
