"""The mixture of experts against a loop over tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from looptim.model import Experts, MoE, Router, Routing, SwiGLU, balance_update
from looptim.model.moe import experts_by_group, experts_by_index, experts_form, experts_one_by_one


def make_moe(width=8, *, dtype=torch.float64, std=0.5, **options):
    options = {"experts": 6, "top_k": 2, "expert_hidden": 4, "shared_hidden": 5} | options
    moe = MoE(width, **options)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return moe.to(dtype)


def naive(moe, x, bias, visit=0):
    """y, and every sequence's loads and auxiliary loss, one token at a time, from the equations alone."""
    matrices = moe.router.weight.reshape(-1, moe.router.num_experts, x.shape[-1])
    router = matrices[min(int(visit), len(matrices) - 1)]
    experts, top_k = len(router), moe.router.top_k
    loads, outputs, losses = [], [], []
    for sequence in x:
        counts, shares = [0] * experts, 0
        for token in sequence:
            s = torch.sigmoid(router @ token)
            ranking = sorted(range(experts), key=lambda i: -(s[i] + bias[i]).item())[:top_k]
            total = sum(s[i] for i in ranking)
            y = moe.shared.down.weight @ (F.silu(moe.shared.gate.weight @ token) * (moe.shared.up.weight @ token))
            for i in ranking:
                hidden = F.silu(moe.experts.gate[i] @ token) * (moe.experts.up[i] @ token)
                y = y + moe.router.scaling * s[i] / total * (moe.experts.down[i] @ hidden)
                counts[i] += 1
            outputs.append(y)
            shares = shares + s / s.sum()
        f = torch.tensor(counts, dtype=x.dtype) * experts / (top_k * len(sequence))
        losses.append((f * shares / len(sequence)).sum())
        loads.append(counts)
    return torch.stack(outputs).view_as(x), torch.tensor(loads), torch.stack(losses)


def assert_equals_naive(moe, x, bias, tolerance=1e-10, **call):
    y, stats = moe(x, **call)
    expected, load, loss = naive(moe, x, bias, call.get("visit", 0))
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(stats.aux_loss, loss, rtol=tolerance, atol=tolerance)
    assert torch.equal(stats.load, load)
    weight = torch.randn_like(y)
    wanted = [x, *moe.parameters()]
    got = torch.autograd.grad((y * weight).sum() + stats.aux_loss.sum(), wanted)
    want = torch.autograd.grad((expected * weight).sum() + loss.sum(), wanted, materialize_grads=True)
    torch.testing.assert_close(got, want, rtol=10 * tolerance, atol=10 * tolerance)
    return stats


# float64 and odd widths take the slices, aligned fp32 takes grouped_mm.
@pytest.mark.parametrize(
    ("dtype", "tolerance", "width"), [(torch.float64, 1e-10, 8), (torch.float32, 2e-5, 8), (torch.float32, 2e-5, 7)]
)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 5), {}),
        ((1, 1), {}),
        ((1, 3), {"top_k": 1}),
        ((3, 4), {"top_k": 6}),
        ((1, 2), {"experts": 1, "top_k": 1}),
        ((1, 2), {"experts": 40}),
    ],
)
def test_value_and_gradient(dtype, tolerance, width, shape, options):
    moe = make_moe(width, dtype=dtype, **options)
    x = torch.randn(*shape, width, dtype=dtype, requires_grad=True)
    assert_equals_naive(moe, x, moe.bias[0], tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_all_tokens_on_one_expert(dtype, tolerance):
    moe = make_moe(dtype=dtype, top_k=1)
    moe.bias[0, 3] = 10
    x = torch.randn(2, 4, 8, dtype=dtype, requires_grad=True)
    stats = assert_equals_naive(moe, x, moe.bias[0], tolerance)
    assert stats.load.sum(0).tolist() == [0, 0, 0, 8, 0, 0]


def test_bias_chooses_but_does_not_weigh():
    router = Router(8, 4, 2).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    bias = torch.tensor([3.0, 0, 0, 3.0], dtype=torch.float64)
    routing = router(x, bias)
    assert routing.indices.sort().values.eq(torch.tensor([0, 3])).all()
    scores = torch.sigmoid(x @ router.weight.T)
    chosen = scores.gather(1, routing.indices)
    torch.testing.assert_close(routing.weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))
    torch.testing.assert_close(routing.scores, scores)


def test_ties_choose_different_experts():
    moe = make_moe(top_k=3)
    torch.nn.init.zeros_(moe.router.weight)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    routing = moe.router(x.flatten(0, 1), moe.bias[0])
    assert all(len(set(row)) == 3 for row in routing.indices.tolist())
    torch.testing.assert_close(routing.weights, torch.full_like(routing.weights, 2.5 / 3))
    y, stats = moe(x)
    assert y.isfinite().all() and stats.load.sum() == 18


def test_scores_that_underflow_give_finite_weights():
    router = Router(2, 3, 2)
    torch.nn.init.constant_(router.weight, -1000.0)
    assert router(torch.ones(1, 2), torch.zeros(3)).weights.isfinite().all()


def test_router_is_fp32_under_autocast_and_in_bf16():
    router = Router(64, 16, 4)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(30, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x, torch.zeros(16))
    assert routing.scores.dtype == torch.float32
    torch.testing.assert_close(routing.scores, torch.sigmoid(x @ router.weight.T), rtol=1e-5, atol=1e-6)
    assert router(x.bfloat16(), torch.zeros(16)).scores.dtype == torch.float32


def test_bf16_and_autocast():
    moe = make_moe(64, dtype=torch.float32, expert_hidden=32, shared_hidden=32, std=0.1)
    x = torch.randn(2, 20, 64)
    expected, _ = moe(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = moe(x)
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).abs().max() < 0.03 * expected.abs().max()
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.parameters())
    y, _ = moe.bfloat16()(x.bfloat16())
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    # Rounding the router's weights may move single tokens to other experts, so compare on the whole.
    assert (y.float() - expected).norm() < 0.2 * expected.norm()


def test_experts_differentiate_twice():
    experts = Experts(3, experts=3, hidden=2).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([[0, 2], [2, 0], [0, 2], [0, 2]])

    def apply(x, weights, *_):
        return experts(x, Routing(indices, weights, weights))

    inputs = (x, weights, *experts.parameters())
    assert torch.autograd.gradcheck(apply, inputs)
    assert torch.autograd.gradgradcheck(apply, inputs)


@pytest.mark.parametrize("tokens", [1, 3])
def test_few_tokens_have_the_sum_of_many(tokens):
    experts = Experts(8, experts=6, hidden=4).double()
    x = torch.randn(tokens, 8, dtype=torch.float64)
    weights, indices = torch.rand(tokens, 6, dtype=torch.float64).topk(2)
    routing, matrices = Routing(indices, weights, weights), (experts.gate, experts.up, experts.down)
    expected = experts_by_group(x, routing, *matrices)
    torch.testing.assert_close(experts_one_by_one(x, routing, *matrices), expected)
    torch.testing.assert_close(experts_by_index(x, routing, *matrices), expected)
    assert experts_form(routing, matrices) is experts_by_group
    with torch.no_grad():
        assert experts_form(routing, matrices) is experts_one_by_one
        torch.testing.assert_close(experts(x, routing), expected)


def test_statistics_are_left_out_where_nobody_looks():
    moe = make_moe()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    y, stats = moe(x, stats=False)
    assert stats is None
    assert torch.equal(y, moe(x)[0])


def test_meta_device_counts_what_the_cpu_runs():
    def flops(device):
        moe = make_moe(dtype=torch.float32).to(device)
        x = torch.randn(2, 7, 8, device=device, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            y, stats = moe(x)
            forward = counter.get_total_flops()
            (y.sum() + stats.aux_loss.sum()).backward()
        assert y.shape == x.shape and stats.load.shape == (2, 6) and stats.aux_loss.shape == (2,)
        return forward, counter.get_total_flops()

    tokens, routed, shared, router = 14, 3 * 8 * 4 * 2, 3 * 8 * 5, 8 * 6
    forward = 2 * tokens * (routed + shared + router)
    assert flops("meta") == flops("cpu") == (forward, 3 * forward)


def test_per_visit_bias_rows():
    moe = make_moe(top_k=1, biases=3)
    moe.bias[:] = 10 * torch.eye(6)[[4, 0, 2]]
    x = torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    for visit, expert in [(0, 4), (1, 0), (2, 2), (7, 2)]:
        for form in (visit, torch.tensor(visit)):
            stats = assert_equals_naive(moe, x, moe.bias[min(visit, 2)], visit=form)
            assert stats.load[0, expert] == 5


def test_a_router_per_visit():
    moe = make_moe(routers=3)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    for visit in (0, 2, 7):
        for form in (visit, torch.tensor(visit)):
            assert_equals_naive(moe, x, moe.bias[0], visit=form)
    # Only the router of this visit gets a gradient, and a visit beyond the last has that one's.
    (gradient,) = torch.autograd.grad(moe(x, 5)[0].square().sum(), [moe.router.weight])
    assert gradient[2].any() and not gradient[:2].any()


def test_pooled_bias_ignores_the_visit():
    moe = make_moe()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    assert torch.equal(moe(x, 0)[0], moe(x, 5)[0])


def test_aux_loss_is_one_when_balanced_and_larger_when_not():
    moe = make_moe(experts=4, top_k=1)
    moe.router.weight.data = torch.eye(4, 8, dtype=torch.float64) * 9
    balanced = torch.eye(4, 8, dtype=torch.float64).unsqueeze(0)
    skewed = balanced[:, :1].expand(1, 4, 8)
    assert abs(moe(balanced)[1].aux_loss.item() - 1) < 1e-9
    assert moe(skewed)[1].aux_loss > 1.5
    # Balanced over the batch but not within its sequences is not balanced.
    assert (moe(balanced.transpose(0, 1).expand(4, 3, 8))[1].aux_loss > 1.5).all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_counts_once_and_changes_nothing(use_reentrant):
    moe = make_moe()
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    buffers = {name: buffer.clone() for name, buffer in moe.named_buffers()}
    y, stats = moe(x)
    want = torch.autograd.grad(y.square().sum() + stats.aux_loss.sum(), [x, *moe.parameters()])
    again, load, aux = checkpoint(
        lambda x: (lambda y, s: (y, s.load, s.aux_loss))(*moe(x)), x, use_reentrant=use_reentrant
    )
    moe.zero_grad()
    (again.square().sum() + aux.sum()).backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in moe.parameters())], list(want))
    assert torch.equal(load, stats.load) and load.sum() == 20
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in moe.named_buffers())


def skew_after(updates, rate):
    """Largest load over the mean load of a router that starts by preferring a few experts."""
    generator = torch.Generator().manual_seed(0)
    router = Router(16, 8, 2)
    router.weight.data = torch.randn(8, 16, generator=generator) * 0.1
    x = torch.randn(512, 16, generator=generator)
    x[:, 0] = 3
    router.weight.data[:2, 0] = 1
    bias = torch.zeros(1, 8)
    for _ in range(updates + 1):
        load = torch.bincount(router(x, bias[0]).indices.flatten(), minlength=8)
        bias = balance_update(bias, load, rate)
    return (load.max() / load.float().mean()).item()


def test_updates_balance_a_skewed_router():
    assert skew_after(0, 5e-3) > 3.5
    assert skew_after(200, 0.0) > 3.5
    assert skew_after(200, 5e-3) < 1.3


def test_balance_update_is_pure_and_exact():
    bias, load = torch.zeros(2, 4), torch.tensor([[4, 4, 4, 4], [0, 5, 6, 5]])
    new = balance_update(bias, load, rate=0.1)
    torch.testing.assert_close(new, torch.tensor([[0.0, 0, 0, 0], [0.1, -0.1, -0.1, -0.1]]))
    assert bias.eq(0).all()
    assert new.dtype == bias.dtype and not new.requires_grad
    # One token of difference among a hundred million is beyond fp32 but not beyond integers.
    big = torch.tensor([100_000_001, 99_999_999, 100_000_000, 100_000_000])
    assert balance_update(torch.zeros(1, 4), big, rate=1.0).tolist() == [[-1, 1, 0, 0]]


def test_swiglu():
    mlp = SwiGLU(4, 6).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    gate, up = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    torch.testing.assert_close(mlp(x), (gate / (1 + torch.exp(-gate)) * up) @ mlp.down.weight.T)


def test_parameters_and_buffers():
    moe = MoE(8, experts=4, top_k=2, expert_hidden=3, shared_hidden=5, biases=2)
    shapes = {name: tuple(value.shape) for name, value in moe.state_dict().items()}
    assert shapes == {
        "bias": (2, 4),
        "router.weight": (4, 8),
        "experts.gate": (4, 3, 8),
        "experts.up": (4, 3, 8),
        "experts.down": (4, 8, 3),
        "shared.gate.weight": (5, 8),
        "shared.up.weight": (5, 8),
        "shared.down.weight": (8, 5),
    }
    assert moe.router.num_experts == 4
    assert all(p.isfinite().all() and p.std() > 0 for p in moe.parameters())


@pytest.mark.parametrize("top_k", [0, 5])
def test_bad_top_k(top_k):
    with pytest.raises(ValueError, match="top_k"):
        MoE(8, experts=4, top_k=top_k, expert_hidden=4, shared_hidden=4)
