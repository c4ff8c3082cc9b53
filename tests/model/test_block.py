"""The block: residuals, causality, one compilation for all its visits."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from looptim.model import Attention, Block, MoE, SwiGLU, causal_attention, rope_table

WIDTH, LENGTH = 16, 24


def attend_5(q, k, v):
    return causal_attention(q, k, v, window=5)


def make_block(*, moe=True, visits=1, dtype=torch.float32):
    feedforward = (
        MoE(WIDTH, experts=6, top_k=2, expert_hidden=8, shared_hidden=8, biases=visits) if moe else SwiGLU(WIDTH, 24)
    )
    block = Block(Attention(WIDTH, heads=4, kv_heads=2, head_dim=8), feedforward, width=WIDTH)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block.to(dtype)


def inputs(dtype=torch.float32, length=LENGTH):
    return torch.randn(2, length, WIDTH, dtype=dtype), rope_table(torch.arange(length), 4, 1e4)


def rms_normalized(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + norm.gain)


@pytest.mark.parametrize("moe", [False, True])
def test_is_two_prenorm_residuals(moe):
    block, (x, rope), slot = make_block(moe=moe, dtype=torch.float64), inputs(torch.float64), attend_5
    y, stats = block(x, slot, rope)
    middle = x + block.attention(rms_normalized(x, block.attention_norm), slot, rope)
    added = block.feedforward(rms_normalized(middle, block.feedforward_norm))
    torch.testing.assert_close(y, middle + (added[0] if moe else added))
    if moe:
        assert torch.equal(stats.load, added[1].load) and stats.load.sum() == 2 * LENGTH * 2
    else:
        assert stats is None


@pytest.mark.parametrize("window", [None, 5])
def test_causal_by_gradient(window):
    block, (x, rope) = make_block(dtype=torch.float64), inputs(torch.float64)
    x.requires_grad_()
    for i in (0, 7, LENGTH - 1):
        (grad,) = torch.autograd.grad(
            block(x, partial(causal_attention, window=window), rope)[0][:, i].square().sum(), x
        )
        seen = grad.abs().sum((0, 2)).nonzero().flatten().tolist()
        assert seen == list(range(0 if window is None else max(0, i - window + 1), i + 1))


def test_every_parameter_gets_a_gradient():
    block, (x, rope) = make_block(), inputs()
    y, stats = block(x, causal_attention, rope)
    (y.square().sum() + stats.aux_loss.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in block.parameters())


def test_checkpointed_block_counts_once():
    block, (x, rope) = make_block(), inputs()
    x.requires_grad_()
    y, stats = block(x, attend_5, rope)
    (want,) = torch.autograd.grad(y.square().sum(), x)
    y, again = checkpoint(block, x, attend_5, rope, use_reentrant=False)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(again.load, stats.load)
    torch.testing.assert_close(got, want)


@pytest.mark.long
@pytest.mark.parametrize(("visits", "as_visit"), [(1, int), (3, torch.tensor)])
def test_one_compilation_for_all_slots_and_visits(visits, as_visit):
    torch._dynamo.reset()
    block, (x, rope) = make_block(visits=visits), inputs()
    # Rows that send tokens to different experts, so that a visit baked into the code is seen.
    block.feedforward.bias[:] = 3 * torch.eye(6)[:visits]
    x.requires_grad_()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    wanted = [x, *block.parameters()]
    for visit in range(3):
        y, stats = compiled(x, attend_5, rope, as_visit(visit))
        expected, expected_stats = block(x, attend_5, rope, visit)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(stats.load, expected_stats.load)
        assert stats.load.sum(0).argmax() == min(visit, visits - 1)
        got = torch.autograd.grad(y.square().mean() + stats.aux_loss.sum(), wanted)
        want = torch.autograd.grad(expected.square().mean() + expected_stats.aux_loss.sum(), wanted)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.long
def test_inductor_equals_eager():
    torch._dynamo.reset()
    block, (x, rope) = make_block(), inputs()
    with torch.no_grad():
        y, stats = torch.compile(block, fullgraph=True)(x, causal_attention, rope)
        expected, expected_stats = block(x, causal_attention, rope)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(stats.load, expected_stats.load)


def test_bf16():
    block, (x, rope) = make_block(moe=False), inputs()
    expected, _ = block(x, attend_5, rope)
    y, _ = block.bfloat16()(x.bfloat16(), attend_5, rope)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).norm() < 0.03 * expected.norm()


def test_names():
    names = {name.split(".")[0] for name in make_block().state_dict()}
    assert names == {"attention_norm", "attention", "feedforward_norm", "feedforward"}
