"""The list of contracts every preset must keep, the ones users register included."""

import functools
import io
import itertools
import math

import pytest
import safetensors.torch
import torch
import torch._dynamo.testing

import looptim as lo
from looptim.loop.controls import CausalStep
from looptim.loop.signals import Seen, find_signal

WIDTH, STEPS = 16, 3
MISMATCHED = {"damped", "parcae", "full_bandwidth", "recurrentgpt", "hyperloop"}
OPTIONED = {
    "huginn concat": ("huginn", {"inject": "concat"}),
    "parcae euler": ("parcae", {"gain": "euler", "prelude_norm": True}),
    "vanilla as Ouro": ("vanilla", {"loop_norm": True}),
    "full_bandwidth shifted": ("full_bandwidth", {"token_shift": True}),
    "hyperloop shared": ("hyperloop", {"shared": True}),
    "operloop shared": ("operloop", {"shared": True}),
    "operloop inner product": ("operloop", {"objective": "inner_product"}),
    "operloop sigmoid": ("operloop", {"step": "sigmoid"}),
    "operloop unit": ("operloop", {"step": "unit"}),
}
ALL = {name: (name, {}) for name in lo.PRESETS} | OPTIONED
PAPER = {
    "vanilla": ("y", "1", "1", "I", "−⟨t, o⟩", True),
    "huginn": ("y + e", "1", "1", "I", "−⟨t, o⟩", True),
    "parcae": ("Ā y + B̄ e", "1", "1", "I", "−⟨t, o⟩", False),
    "full_bandwidth": ("σ(W_g e) ⊙ W_u y", "1", "1", "I", "−⟨t, o⟩", False),
    "recurrentgpt": ("W [y + ε, e]", "1", "1 − g", "I", "−⟨t, o⟩", False),
    "recirculation": ("y", "1/‖y‖", "α‖y‖", "I", "−⟨t/‖t‖, o⟩", True),
    "hyperloop": ("H_pre Y", "I − H_res", "1", "H_post", "−⟨t, o⟩", False),
    "operloop": ("H_in Y", "Λ", "η_l", "H_in", "½‖t − o‖²", True),
}

every = pytest.mark.parametrize("case", ALL)


def make(case, width=WIDTH, steps=STEPS):
    name, options = ALL[case]
    return lo.build(name, width=width, steps=steps, **options)


@functools.cache
def verdict_on(case):
    """What `diagnose` says, which is asked by several tests and takes a while."""
    return lo.diagnose(make(case))


def scramble(loop):
    for p in loop.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    return loop


class CausalBlocks(torch.nn.Module):
    """A stand-in for the shared stack that mixes tokens, causally."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.W = torch.nn.Parameter(torch.randn(width, width) / math.sqrt(width))

    def forward(self, o):
        count = torch.arange(1, o.shape[1] + 1, device=o.device, dtype=o.dtype).unsqueeze(-1)
        return o + torch.tanh((o.cumsum(1) / count) @ self.W.to(o.dtype))


@every
def test_every_map_passes_the_dot_product_test(case):
    assert verdict_on(case).adjoint_error < 1e-14


@every
def test_no_part_sees_a_later_token_or_another_sequence(case):
    assert verdict_on(case).leak is None


@every
def test_a_step_is_the_gradient_step_of_its_objective_exactly_when_aligned(case):
    loop = make(case)
    if verdict_on(case).aligned:
        assert lo.check_gradient(loop) < 1e-12
    else:
        with pytest.raises(ValueError, match="not the gradient step"):
            lo.check_gradient(loop)


@pytest.mark.parametrize("name", lo.PRESETS)
def test_only_four_of_the_paper_and_damped_looping_are_mismatched(name):
    verdict = verdict_on(name)
    assert verdict.aligned == (name not in MISMATCHED)
    assert (verdict.gap > 0.1) == (name in MISMATCHED)


@pytest.mark.parametrize("name", PAPER)
def test_describe_is_the_papers_row(name):
    row = lo.describe(lo.build(name, width=WIDTH, steps=STEPS))
    assert (row.projection, row.decay, row.step, row.input_map, row.objective, row.aligned) == PAPER[name]
    assert row.loop_specific == (name in {"hyperloop", "operloop"})


@every
def test_every_parameter_gets_a_gradient_after_the_first_update(case):
    loop, blocks = make(case), CausalBlocks()
    e, weight = torch.randn(2, 6, WIDTH), torch.randn(2, 6, WIDTH)
    parameters = list(loop.parameters())
    for update in range(2):
        loss = (loop(e, blocks) * weight).sum()
        gradients = torch.autograd.grad(loss, parameters) if parameters else []
        if update == 0:
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p -= 3e-3 * g / g.norm().clamp_min(1e-12)
    for (name, _), g in zip(loop.named_parameters(), gradients, strict=True):
        assert g.isfinite().all(), name
        assert g.abs().max() > 0, name


class ZeroBlocks(torch.nn.Module):
    """Blocks whose last matrix starts at zero, with a residual path or without one."""

    def __init__(self, residual):
        super().__init__()
        self.W, self.residual = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH)), residual

    def forward(self, o):
        return self.residual * o + torch.tanh(o) @ self.W.to(o.dtype)


BOUND = 1e4
"""Of a gradient where a norm vanishes; it was 1e13, and fp16 ends at 6.5e4."""


def test_a_step_that_leads_to_zero_shrinks_the_state():
    """Where a full step is against the state itself, nothing is left that has a direction: this gradient was 3e6."""
    loop, blocks = lo.build("operloop_hyperball", width=WIDTH, steps=STEPS, step="unit"), ZeroBlocks(0.0)
    e = torch.randn(2, 6, WIDTH, requires_grad=True)
    gradients = torch.autograd.grad(loop(e, blocks).sum(), [e, *loop.parameters(), blocks.W], allow_unused=True)
    assert max(g.abs().max() for g in gradients if g is not None) < 1e5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every
def test_gradients_are_bounded_where_a_norm_vanishes(case, dtype):
    """A zero state, a tiny one, and a zero error or target, at the initial parameters and at changed ones."""
    weight = torch.randn(2, 6, WIDTH)
    # The released norm of the state itself is one to a loop, and bounds of norms in a row multiply.
    steps = 1 if case == "vanilla as Ouro" else STEPS
    for scale, residual, changed in itertools.product((0.0, 1e-6, 1.0), (0.0, 1.0), (False, True)):
        loop = make(case, steps=steps)
        loop = (scramble(loop) if changed else loop).to(dtype)
        blocks = ZeroBlocks(residual).to(dtype)
        e = (scale * torch.randn(2, 6, WIDTH)).to(dtype).requires_grad_()
        out = loop(e, blocks)
        wanted = [e, *loop.parameters(), *blocks.parameters()]
        gradients = torch.autograd.grad((out.float() * weight).sum(), wanted, allow_unused=True)
        assert out.isfinite().all()
        assert max(g.abs().max() for g in gradients if g is not None) < BOUND


@every
def test_signals_of_depth_are_bounded_where_a_norm_vanishes(case):
    for dtype, scale, residual in itertools.product((torch.float16, torch.bfloat16), (0.0, 1e-6), (0.0, 1.0)):
        e, blocks, seen = (scale * torch.randn(2, 6, WIDTH)).to(dtype), ZeroBlocks(residual).to(dtype), []
        make(case).to(dtype)(e, blocks, observe=lambda *step, seen=seen: seen.append(step))
        for name in ("residual", "change", "acceleration"):
            signal, memory = find_signal(name), None
            for number, step in enumerate(seen, 1):
                value, memory = signal(Seen(number, *step, None, None), memory)
                # Of an acceleration there is none after one step, and the largest number stands for it.
                assert (name == "acceleration" and number < 3) or value.max() < BOUND


@every
def test_no_token_sees_a_later_one(case):
    loop, blocks = scramble(make(case)).eval(), CausalBlocks()
    e = torch.randn(2, 6, WIDTH)
    changed = e.clone()
    changed[:, 3:] += torch.randn(2, 3, WIDTH)
    before, after = loop(e, blocks), loop(changed, blocks)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


@every
def test_two_forwards_agree_in_eval_mode(case):
    loop, blocks = make(case).eval(), CausalBlocks()
    e = torch.randn(2, 6, WIDTH)
    assert torch.equal(loop(e, blocks), loop(e, blocks))


@every
def test_a_prefix_gives_the_same_states(case):
    """What a KV cache needs: a token's state depends on nothing but the tokens up to it."""
    loop, blocks = scramble(make(case)).eval(), CausalBlocks()
    e = torch.randn(2, 6, WIDTH)
    torch.testing.assert_close(loop(e, blocks)[:, :4], loop(e[:, :4], blocks))


@every
def test_state_dict_round_trips_through_safetensors(case, tmp_path):
    loop, other, blocks = scramble(make(case)).eval(), make(case).eval(), CausalBlocks()
    safetensors.torch.save_file(loop.state_dict(), tmp_path / "loop.safetensors")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "loop.safetensors"))
    e = torch.randn(2, 6, WIDTH)
    assert torch.equal(loop(e, blocks), other(e, blocks))


@pytest.mark.long
@every
def test_one_compilation_serves_all_steps_with_the_same_values(case):
    loop, blocks = scramble(make(case)), CausalBlocks()
    # Noise is drawn in another order by compiled code.
    loop.eval()
    e = torch.randn(2, 6, WIDTH, requires_grad=True)
    expected = loop(e, blocks)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for transition in loop.transitions:
        transition.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(loop(e, blocks), expected)
    # A causal step multiplies by the step before it: a constant without a gradient in the first step only.
    causal = isinstance(loop.transitions[0].rule.step, CausalStep)
    assert counter.frame_count == 1 + causal


@pytest.mark.long
@every
def test_the_whole_loop_compiles_without_a_graph_break(case):
    # In float64, since a compiler may add in another order.
    loop, blocks = scramble(make(case)).eval().double(), CausalBlocks().double()
    e = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(loop, fullgraph=True, backend="aot_eager")
    expected, got = loop(e, blocks), compiled(e, blocks)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), e), torch.autograd.grad(expected.square().sum(), e)
    )


@pytest.mark.slow
@every
def test_inductor_gives_the_same_values(case):
    loop, blocks = scramble(make(case)).eval(), CausalBlocks()
    e = torch.randn(2, 6, WIDTH)
    expected = loop(e, blocks)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(loop, fullgraph=True)(e, blocks), expected, rtol=1e-4, atol=1e-5)


@every
def test_a_bf16_forward_stays_within_bf16_error_of_float64(case):
    loop, blocks = scramble(make(case, width=64)).eval(), CausalBlocks(64)
    # The reference starts from the parameters and inputs bf16 has.
    loop.to(torch.bfloat16)
    blocks.to(torch.bfloat16)
    e = torch.randn(2, 6, 64).bfloat16()
    with torch.no_grad(), lo.trace(loop) as trace:
        got = loop(e, blocks)
        loop.double()
        blocks.double()
        expected = loop(e.double(), blocks)
    assert got.dtype == torch.bfloat16
    # Two units in the last place of bf16, 2^-8 each, for each of the three steps and the read-out.
    error = (got.double() - expected).norm() / expected.norm()
    assert error < 8 * 2**-8
    for value in [*trace.step_size[:STEPS], *trace.decay[:STEPS]]:
        assert value.dtype == torch.float32
    if isinstance(trace.input_map[0], lo.maps.Streams):
        assert trace.input_map[0].h.dtype == torch.float32


def test_maps_stay_in_fp32_under_autocast():
    loop = lo.build("operloop", width=16, steps=2)
    with torch.autocast("cpu", torch.bfloat16), lo.trace(loop) as trace:
        loop(torch.randn(2, 6, 16), torch.nn.Linear(16, 16))
    assert trace.input_map[0].h.dtype == trace.step_size[0].dtype == trace.decay[0].dtype == torch.float32


@pytest.mark.parametrize("preset", ["operloop", "hyperloop", "operloop_bounded", "operloop_muon"])
def test_autocast_changes_no_value_of_a_transition(preset):
    loop = scramble(lo.build(preset, width=16, steps=2)).eval()
    e = torch.randn(2, 6, 16)
    with lo.trace(loop) as plain:
        loop(e, torch.tanh)
    with torch.autocast("cpu", torch.bfloat16), lo.trace(loop) as cast:
        loop(e, torch.tanh)
    for name in ("state", "step_size", "decay"):
        for here, there in zip(getattr(plain, name), getattr(cast, name), strict=True):
            torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)


def test_a_gate_of_channels_is_computed_in_fp32_under_autocast():
    step = scramble(lo.controls.GatedStep(16))
    ctx = lo.Context(torch.randn(2, 6, 1, 16), None, torch.randn(2, 6, 16))
    with torch.autocast("cpu", torch.bfloat16):
        cast = step(ctx, 1.0)
    torch.testing.assert_close(cast, step(ctx, 1.0), rtol=1e-6, atol=1e-6)


def test_a_decay_that_is_a_matrix_is_applied_in_fp32_under_autocast():
    Y, matrix = torch.randn(1, 2, 4, 8), torch.randn(4, 4)
    expected = lo.rules.descend(Y, torch.zeros_like(Y), 0.3, lo.controls.StreamMatrix(matrix))
    with torch.autocast("cpu", torch.bfloat16):
        got = lo.rules.descend(Y, torch.zeros_like(Y), 0.3, lo.controls.StreamMatrix(matrix))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("preset", ["operloop", "operloop_bounded"])
def test_what_is_written_to_a_bf16_state_is_not_rounded(preset):
    loop, seen = lo.build(preset, width=16, steps=2).bfloat16(), []
    loop(torch.randn(1, 2, 16).bfloat16(), torch.tanh, observe=lambda _, record: seen.append(record))
    assert [record.o.dtype for record in seen] == [torch.bfloat16] * 2
    assert [record.x.write(record.g).dtype for record in seen] == [torch.float32] * 2


def test_noise_in_bf16_has_as_many_values_as_bf16_has():
    start = lo.state.Noise(64, std=1.0)
    assert start(torch.zeros(8, 64, 64, dtype=torch.bfloat16)).unique().numel() > 700


def test_noise_goes_where_its_input_is():
    start = lo.state.Noise(8, std=1.0).eval()
    assert start(torch.empty(1, 2, 8, device="meta")).is_meta


def test_noise_differs_between_tokens_in_training_and_follows_the_seed_in_eval():
    loop = lo.build("parcae", width=16, steps=2)
    e = torch.randn(1, 2, 16)
    start = loop.start(e)
    assert not torch.equal(start[:, 0], start[:, 1])
    assert start.abs().max() <= 3 * loop.start.std
    loop.eval()
    assert torch.equal(loop.start(e)[:, 0], loop.start(e)[:, 1])
    assert torch.equal(loop.start.fixed, lo.build("parcae", width=16, steps=2).start.fixed)
    assert not torch.equal(loop.start.fixed, lo.build("parcae", width=16, steps=2, seed=1).start.fixed)


def test_noise_has_the_standard_deviation_it_says():
    start = lo.state.Noise(1024, std=0.5)
    drawn = start(torch.zeros(4, 64, 1024))
    # A normal cut at three sigma has 0.9866 of the variance's root.
    assert drawn.std().item() == pytest.approx(0.5 * 0.9866, rel=1e-2)
    assert start.fixed.std().item() == pytest.approx(0.5 * 0.9866, rel=0.1)


def test_recurrentgpt_noise_is_drawn_in_training_only():
    loop, e = lo.build("recurrentgpt", width=16, steps=2, noise=0.1), torch.randn(1, 2, 16)
    assert not torch.equal(loop(e, torch.tanh), loop(e, torch.tanh))
    loop.eval()
    assert torch.equal(loop(e, torch.tanh), loop(e, torch.tanh))


def test_aligned_twins_share_the_start_of_their_originals():
    torch.manual_seed(3)
    original = lo.build("hyperloop", width=16, steps=3)
    torch.manual_seed(3)
    twin = lo.build("hyperloop_aligned", width=16, steps=3)
    for name, p in twin.state_dict().items():
        assert torch.equal(p, original.state_dict()[name]), name


def test_operloops_ablations_share_the_start_of_their_common_parts():
    states = []
    for step in ("causal", "sigmoid", "unit"):
        torch.manual_seed(3)
        states.append(lo.build("operloop", width=16, steps=1, step=step).state_dict())
    for name in states[2]:
        assert torch.equal(states[0][name], states[1][name])
        assert torch.equal(states[0][name], states[2][name])


def test_a_loop_can_be_pickled():
    buffer = io.BytesIO()
    torch.save(lo.build("operloop", width=16, steps=2), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).name == "operloop"
