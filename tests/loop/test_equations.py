"""Every preset's step against the paper's equation, written out straight from its parameters, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

import looptim as lo

WIDTH, STREAMS, STEPS = 12, 4, 3
CLOSE = {"rtol": 0, "atol": 1e-10}


def scramble(module):
    """Generic parameters: initial values such as zeros and identities would hide mistakes."""
    for p in module.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    return module


def make(name, **options):
    return scramble(lo.build(name, width=WIDTH, steps=STEPS, **options).double()).eval()


@pytest.fixture
def e():
    return torch.randn(2, 5, WIDTH, dtype=torch.float64)


@pytest.fixture
def blocks():
    M = torch.randn(WIDTH, WIDTH, dtype=torch.float64) / math.sqrt(WIDTH)
    return lambda o: o + torch.tanh(o @ M)


def gate(g, Y):
    """sigmoid(a . (W Z) + b), Z = RMSNorm(flatten(Y)), written with explicit sums."""
    Z = Y.reshape(*Y.shape[:2], -1)
    Z = Z / Z.pow(2).mean(-1, keepdim=True).sqrt()
    return 1 / (1 + torch.exp(-(g.a * torch.einsum("on,btn->bto", g.W, Z) + g.b)))


def vanilla(loop, e, blocks):
    y = e
    for _ in range(STEPS):
        y = blocks(y)
    return y


def ouro(loop, e, blocks):
    gain = loop.transitions[0].target.gain
    y = e
    for _ in range(STEPS):
        t = blocks(y)
        y = t / (t.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + gain)
    return y


def huginn(loop, e, blocks):
    y = loop.start.fixed.expand_as(e)
    for _ in range(STEPS):
        y = blocks(y + e)
    return y


def huginn_concat(loop, e, blocks):
    A = loop.transitions[0].projection.W
    y = loop.start.fixed.expand_as(e)
    for _ in range(STEPS):
        y = blocks(torch.cat([y, e], -1) @ A.T)
    return y


def parcae(loop, e, blocks, gain="exact", aligned=False, norm=None):
    p = loop.transitions[0].projection
    p = getattr(p, "projection", p)
    dt, A = torch.log1p(p.dt_bias.exp()), p.A_log.exp()
    A_bar = torch.exp(-dt * A)
    B_bar = torch.diag((1 - A_bar) / A if gain == "exact" else dt) @ p.B
    inject = e if norm is None else e / (e.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + norm)
    y = loop.start.fixed.expand_as(e)
    for _ in range(STEPS):
        y = blocks(A_bar * y + inject @ B_bar.T)
        y = A_bar * y if aligned else y
    return y @ loop.readout.C.T


def full_bandwidth(loop, e, blocks, aligned=False):
    p = loop.transitions[0].projection
    g = torch.sigmoid(e @ p.W_g.T)
    y = e
    for _ in range(STEPS):
        t = blocks(g * (y @ p.W_u.T))
        y = (g * t) @ p.W_u if aligned else t
    return y


def full_bandwidth_shifted(loop, e, blocks):
    p = loop.transitions[0].projection.projection
    g = torch.sigmoid(e @ p.W_g.T)
    y = e
    for _ in range(STEPS):
        before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        y = blocks(g * (before @ p.W_u.T))
    return y


def recurrentgpt(loop, e, blocks, aligned=False):
    W, step = loop.transitions[0].projection.W, loop.transitions[0].rule.step
    y = e
    for _ in range(STEPS):
        g = torch.sigmoid(torch.cat([y, e], -1) @ step.W.T + step.b)
        t = blocks(torch.cat([y, e], -1) @ W.T)
        y = g * y + (1 - g) * (t @ W[:, :WIDTH] if aligned else t)
    return y


def recirculation(loop, e, blocks):
    alpha, y = 0.1, e
    for _ in range(STEPS):
        t = blocks(y)
        y = (1 - alpha) * y + alpha * y.norm(dim=-1, keepdim=True) * t / t.norm(dim=-1, keepdim=True)
    return y


def hyperloop(loop, e, blocks, aligned=False):
    Y = torch.stack([e] * STREAMS, -2)
    for step in loop.transitions:
        pre = gate(step.projection.map.gate, Y)
        post = pre if aligned else 2 * gate(step.write.gate, Y)
        res = torch.diag_embed(gate(step.rule.decay.gate, Y))
        t = blocks(torch.einsum("btr,btrd->btd", pre, Y)) + step.target.bias
        Y = res @ Y + torch.einsum("btr,btd->btrd", post, t)
    return Y.mean(-2)


def operloop(loop, e, blocks, form="delta", objective="delta", step_size="causal"):
    """Algorithm 1, in the delta form (Eq. 12) or the residual-map form (Eq. 16)."""
    Y = torch.stack([e] * STREAMS, -2)
    eta = torch.ones(*e.shape[:2], 1, 1, dtype=e.dtype)
    identity = torch.eye(STREAMS, dtype=e.dtype)
    for step in loop.schedule():
        H = gate(step.projection.map.gate, Y).unsqueeze(-2)
        Lam = torch.diag_embed(gate(step.rule.decay.gate, Y))
        if step_size != "unit":
            sigma = gate(step.rule.step.gate, Y).unsqueeze(-1)
            eta = sigma * eta if step_size == "causal" else sigma
        o = H @ Y
        t = (blocks(o.squeeze(-2)) + step.target.bias).unsqueeze(-2)
        error = t - o if objective == "delta" else t
        if form == "delta":
            Y = (identity - eta * Lam) @ Y + eta * H.mT @ error
        else:
            H_res = identity - eta * (Lam + H.mT @ H)
            Y = H_res @ Y + (eta * H).mT @ t
    return Y.mean(-2)


def damped(loop, e, blocks):
    y = e
    for _ in range(loop.steps):
        y = y + (blocks(y) - y) / loop.steps
    return 0.5 * y + 0.5 * blocks(e)


CASES = {
    "none": ("none", {}, vanilla, {}),
    "vanilla": ("vanilla", {}, vanilla, {}),
    "vanilla as Ouro": ("vanilla", {"loop_norm": True}, ouro, {}),
    "huginn add": ("huginn", {}, huginn, {}),
    "huginn concat": ("huginn", {"inject": "concat"}, huginn_concat, {}),
    "parcae exact": ("parcae", {}, parcae, {}),
    "parcae euler": ("parcae", {"gain": "euler"}, parcae, {"gain": "euler"}),
    "parcae aligned": ("parcae_aligned", {}, parcae, {"aligned": True}),
    "full_bandwidth": ("full_bandwidth", {}, full_bandwidth, {}),
    "full_bandwidth shifted": ("full_bandwidth", {"token_shift": True}, full_bandwidth_shifted, {}),
    "full_bandwidth aligned": ("full_bandwidth_aligned", {}, full_bandwidth, {"aligned": True}),
    "recurrentgpt": ("recurrentgpt", {}, recurrentgpt, {}),
    "recurrentgpt aligned": ("recurrentgpt_aligned", {}, recurrentgpt, {"aligned": True}),
    "recirculation": ("recirculation", {}, recirculation, {}),
    "damped": ("damped", {}, damped, {}),
    "hyperloop": ("hyperloop", {}, hyperloop, {}),
    "hyperloop aligned": ("hyperloop_aligned", {}, hyperloop, {"aligned": True}),
    "operloop, delta form": ("operloop", {}, operloop, {"form": "delta"}),
    "operloop, residual-map form": ("operloop", {}, operloop, {"form": "residual"}),
    "operloop shared": ("operloop", {"shared": True}, operloop, {}),
    "operloop, inner product": ("operloop", {"objective": "inner_product"}, operloop, {"objective": "inner_product"}),
    "operloop, sigmoid step": ("operloop", {"step": "sigmoid"}, operloop, {"step_size": "sigmoid"}),
    "operloop, unit step": ("operloop", {"step": "unit"}, operloop, {"step_size": "unit"}),
}


@pytest.mark.parametrize("case", CASES)
def test_step_equals_the_papers_equation_in_value_and_gradient(case, e, blocks):
    name, options, reference, arguments = CASES[case]
    loop = make(name, **options)
    e.requires_grad_()
    weight = torch.randn_like(e)
    inputs = [e, *loop.parameters()]
    results = []
    for run in (lambda: loop(e, blocks), lambda: reference(loop, e, blocks, **arguments)):
        out = run()
        results.append((out, torch.autograd.grad((out * weight).sum(), inputs)))
    (value, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(value, expected, **CLOSE)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_parcae_normalizes_the_prelude_output_if_asked(e, blocks):
    loop = make("parcae", prelude_norm=True)
    expected = parcae(loop, e, blocks, norm=loop.transitions[0].projection.gain)
    torch.testing.assert_close(loop(e, blocks), expected, **CLOSE)


def test_hyperloop_with_operloops_maps_is_operloop(e, blocks):
    """Section 4: H_pre = H_in, H_post = eta H_in, H_res = I - eta (Lam + H^T H) recovers OperLoop."""
    operloop_step = make("operloop", step="sigmoid").transitions[0]

    class Post(lo.MapPart):
        def forward(self, ctx):
            eta = operloop_step.rule.step(ctx, 1.0).squeeze(-1)
            return lo.maps.Streams(eta * operloop_step.projection(ctx)[0].h)

    class Residual(lo.Decay):
        def forward(self, ctx):
            h, Lam = operloop_step.projection(ctx)[0].h, operloop_step.rule.decay(ctx).squeeze(-1)
            eta = operloop_step.rule.step(ctx, 1.0)
            return lo.controls.StreamMatrix(eta * (torch.diag_embed(Lam) + h.unsqueeze(-1) * h.unsqueeze(-2)))

    hyperloop_step = lo.Transition(
        operloop_step.projection,
        lo.objectives.InnerProduct(),
        lo.rules.GradientDescent(lo.controls.ConstantStep(), Residual()),
        write=Post(),
        target=operloop_step.target,
    )
    Y = torch.randn(2, 5, STREAMS, WIDTH, dtype=torch.float64)
    got, _ = hyperloop_step(Y, e, blocks, hyperloop_step.rule.init(Y))
    expected, _ = operloop_step(Y, e, blocks, operloop_step.rule.init(Y))
    torch.testing.assert_close(got, expected, **CLOSE)


def released_parcae_injection(A_log, dt_bias, B, y, e):
    """The injection of the released Parcae code, from its description: y exp(-dt A) + dt (B e)."""
    dt = F.softplus(dt_bias)
    return y * torch.exp(-dt * torch.exp(A_log)) + dt * (e @ B.T)


def test_parcae_euler_is_the_released_injection(e):
    projection = make("parcae", gain="euler").transitions[0].projection
    Y = torch.randn(2, 5, 1, WIDTH, dtype=torch.float64)
    H, b = projection(lo.Context(Y, None, e))
    expected = released_parcae_injection(projection.A_log, projection.dt_bias, projection.B, Y.squeeze(-2), e)
    torch.testing.assert_close(H.read(Y) + b, expected, **CLOSE)


def test_parcae_euler_is_the_parcae_lm_packages_injection(e):
    """The same against the authors' package, where it is installed with its code (parcae-lm 0.1.0 on PyPI has none)."""
    injection = pytest.importorskip(
        "parcae_lm.modules.injection",
        reason="parcae-lm 0.1.0 on PyPI ships metadata only; install it from its repository",
    )

    class Init:
        def fn(self, name, layer):
            return torch.nn.init.zeros_

    class Config:
        recurrent_embedding_dimension = n_embd = WIDTH
        init = Init()

    released = scramble(injection.DiagonalInjection(Config()).double())
    ours = make("parcae", gain="euler").transitions[0].projection
    ours.load_state_dict(released.state_dict())
    Y = torch.randn(2, 5, 1, WIDTH, dtype=torch.float64)
    H, b = ours(lo.Context(Y, None, e))
    torch.testing.assert_close(H.read(Y) + b, released(Y.squeeze(-2), e), **CLOSE)


def test_initial_values_are_the_released_ones():
    parcae = lo.build("parcae", width=8, steps=2)
    projection = parcae.transitions[0].projection
    assert projection.A_log.abs().max() == 0
    assert projection.dt_bias[0].item() == pytest.approx(0.21194, abs=1e-5)
    assert torch.exp(-F.softplus(projection.dt_bias))[0].item() == pytest.approx(math.sqrt(0.2))
    assert torch.equal(projection.B, torch.eye(8))
    C = parcae.readout.C
    torch.testing.assert_close(C @ C.T, 0.4 * torch.eye(8))

    step = lo.build("hyperloop", width=8, steps=2).transitions[0]
    ctx = lo.Context(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 32), torch.zeros(1, 1, 8))
    assert step.projection(ctx)[0].h.sum().item() == pytest.approx(2.249, abs=1e-3)
    assert step.write(ctx).h[0, 0, 0].item() == 1
    assert 1 - step.rule.decay(ctx)[0, 0, 0, 0].item() == pytest.approx(0.731, abs=1e-3)


@pytest.mark.parametrize(("name", "growth"), [("hyperloop", 2.98), ("hyperloop_aligned", 1.995)])
def test_hyperloop_grows_at_initialization_as_computed(name, growth):
    loop = lo.build(name, width=256, steps=1, scale=0.0)
    e = torch.randn(1, 4, 256)
    assert (loop(e, lambda o: o).norm() / e.norm()).item() == pytest.approx(growth, abs=5e-3)


def test_operloop_copy_path_adds_no_growth():
    """With Blocks(o) = o + D(o), the delta write is exactly eta H^T (D(o) + e_l): for D = 0 the state only decays."""
    loop = lo.build("operloop", width=64, steps=3, scale=0.0, step_init=0.9, decay_init=0.05)
    e = torch.randn(1, 4, 64)
    expected = math.prod(1 - 0.9**step * 0.05 for step in (1, 2, 3))
    torch.testing.assert_close(loop(e, lambda o: o), expected * e)
