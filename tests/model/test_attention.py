"""Attention against an explicit mask over all pairs."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from looptim.model import Attention, apply_rope, causal_attention, document_starts, rope_table
from looptim.model.attention import flex_masked_attention, visible

LENGTHS_AND_WINDOWS = [
    (1, None), (9, None), (1, 1), (1, 4), (5, 1), (3, 8), (8, 8), (9, 8), (33, 32), (40, 8),
    (64, 32), (65, 32), (75, 3), (100, 33), (130, 64), (257, 128), (300, 160),
]  # fmt: skip


def naive(q, k, v, window):
    length = q.shape[2]
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    visible = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        visible[i, 0 if window is None else max(0, i - window + 1) : i + 1] = True
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v


def random_qkv(length, *, heads=4, kv_heads=2, dim=8, batch=2, dtype=torch.float64):
    # The layout the projections give: heads inside positions.
    return tuple(
        torch.randn(batch, length, h, dim, dtype=dtype).transpose(1, 2).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("length", "window"), LENGTHS_AND_WINDOWS)
def test_value_and_gradient(length, window, kv_heads):
    qkv = random_qkv(length, kv_heads=kv_heads)
    y, expected = causal_attention(*qkv, window=window), naive(*qkv, window)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(y)
    got = torch.autograd.grad((y * weight).sum(), qkv)
    want = torch.autograd.grad((expected * weight).sum(), qkv)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("length", "window"), [(70, None), (70, 16)])
def test_lower_precision(dtype, tolerance, length, window):
    qkv = random_qkv(length, dtype=dtype)
    y = causal_attention(*qkv, window=window)
    y.sum().backward()
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), naive(*(t.double() for t in qkv), window), rtol=tolerance, atol=tolerance)
    assert all(t.grad.isfinite().all() for t in qkv)


@pytest.mark.parametrize("window", [None, 5, 32])
def test_a_query_sees_exactly_its_window(window):
    q, k, v = random_qkv(100, batch=1)
    for i in (0, 4, 5, 31, 32, 63, 64, 99):
        grads = torch.autograd.grad(causal_attention(q, k, v, window=window)[:, :, i].square().sum(), [k, v])
        for grad in grads:
            seen = grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist()
            first = 0 if window is None else max(0, i - window + 1)
            # With one key alone the softmax is constant and its key gets no gradient.
            assert seen == list(range(first, i + 1)) or (i == 0 and seen == [])


def forward_backward_flops(length, window, document=None):
    # The meta device takes the math path, which counts every score that is computed, masked or not.
    qkv = [t.detach().to("meta").requires_grad_() for t in random_qkv(length, batch=1)]
    starts = None if document is None else document_starts(torch.arange(length).unsqueeze(0) // document)
    with FlopCounterMode(display=False) as counter:
        causal_attention(*qkv, window=window, starts=starts).sum().backward()
    return counter.get_total_flops()


def test_cost_is_linear_in_length():
    assert 1.9 < forward_backward_flops(4096, 128) / forward_backward_flops(2048, 128) < 2.1
    assert forward_backward_flops(4096, None) / forward_backward_flops(2048, None) > 3.9
    assert forward_backward_flops(4096, 128) < forward_backward_flops(4096, None) / 20


@pytest.mark.parametrize("document", [50, 300, 2048])
def test_cost_of_windows_inside_documents_is_linear_in_length(document):
    once, twice = (forward_backward_flops(length, 128, document) for length in (2048, 4096))
    assert 1.9 < twice / once < 2.1
    # Documents never add to what a window takes; where they are shorter than it, they take away.
    assert twice <= forward_backward_flops(4096, 128)
    assert forward_backward_flops(4096, None, document) < 1.1 * forward_backward_flops(4096, None) * document / 4096


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


def test_no_mask_over_all_pairs():
    length = 2048
    qkv = random_qkv(length, heads=2, kv_heads=1, dim=4, batch=1, dtype=torch.float32)
    with LargestTensor() as largest:
        causal_attention(*qkv, window=32).sum().backward()
    assert largest.numel < length * length / 50


# Rows of documents of many lengths: shorter and longer than the window, one token, the whole row.
LENGTHS = [[1, 40, 3, 3, 53], [100], [99, 1], [8, 7, 9, 8, 68]]
DOCUMENTS = torch.stack([torch.repeat_interleave(torch.arange(len(row)) % 3, torch.tensor(row)) for row in LENGTHS])


@pytest.mark.parametrize("window", [None, 1, 8, 32, 100])
def test_documents_attend_as_if_each_were_alone(window):
    qkv = random_qkv(100, batch=4)
    y = causal_attention(*qkv, window=window, starts=document_starts(DOCUMENTS))
    expected = torch.cat(
        [
            torch.cat(
                [naive(*part, window) for part in zip(*(t[b : b + 1].split(row, 2) for t in qkv), strict=True)], 2
            )
            for b, row in enumerate(LENGTHS)
        ]
    )
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, qkv, upstream), torch.autograd.grad(expected, qkv, upstream), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_documents_take_no_mask_over_all_pairs_and_cost_what_they_see():
    length, starts = 2048, document_starts(torch.arange(2048).unsqueeze(0) // 256)
    qkv = random_qkv(length, heads=2, kv_heads=1, dim=4, batch=1, dtype=torch.float32)
    for window in (None, 32):
        with LargestTensor() as largest:
            causal_attention(*qkv, window=window, starts=starts).sum().backward()
        assert largest.numel < length * length / 50


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("documents", [False, True])
def test_flex_attention_composes_the_same_masks(window, documents):
    q, k, v = (t.detach().float() for t in random_qkv(100, dim=16, batch=4))
    starts = document_starts(DOCUMENTS) if documents else None
    expected = causal_attention(q, k, v, window=window, starts=starts)
    # Uncompiled it runs anywhere; on a GPU the compiled kernel takes the same mask.
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        y = flex_masked_attention(q, k, v, window=window, starts=starts)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_masks_compose():
    starts = document_starts(torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))
    place = torch.arange(8)
    square = visible(3, starts)(torch.tensor(0), torch.tensor(0), place[:, None], place[None, :])
    seen = [row.nonzero().flatten().tolist() for row in square]
    assert seen == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [4], [4, 5], [4, 5, 6], [5, 6, 7]]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_module(qk_norm):
    attention = Attention(12, heads=4, kv_heads=2, head_dim=6, qk_norm=qk_norm).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    rope = rope_table(torch.arange(9), 4, 1e4)
    q, k, v = (x @ m.weight.T for m in (attention.q, attention.k, attention.v))
    q, k, v = (t.view(2, 9, -1, 6).transpose(1, 2) for t in (q, k, v))
    if qk_norm:
        torch.nn.init.normal_(attention.q_norm.gain)
        torch.nn.init.normal_(attention.k_norm.gain)
        q = q / (q.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + attention.q_norm.gain)
        k = k / (k.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + attention.k_norm.gain)
    expected = naive(apply_rope(q, *rope), apply_rope(k, *rope), v, 4).transpose(1, 2).reshape(2, 9, 24)
    torch.testing.assert_close(attention(x, partial(causal_attention, window=4), rope), expected @ attention.o.weight.T)
    names = {"q.weight", "k.weight", "v.weight", "o.weight"}
    assert set(attention.state_dict()) == (names | {"q_norm.gain", "k_norm.gain"} if qk_norm else names)


def test_any_callable_can_be_the_slot():
    attention = Attention(8, heads=2, kv_heads=1, head_dim=4)
    seen = []

    def attend(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return torch.zeros_like(q)

    y = attention(torch.randn(3, 5, 8), attend, rope_table(torch.arange(5), 4, 1e4))
    assert seen == [((3, 2, 5, 4), (3, 1, 5, 4), (3, 1, 5, 4))]
    assert y.eq(0).all()


def test_bad_input():
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        Attention(8, heads=3, kv_heads=2, head_dim=4)
    q, k, v = random_qkv(4)
    with pytest.raises(ValueError, match="at least 1"):
        causal_attention(q, k, v, window=0)
    with pytest.raises(ValueError, match="slot"):
        causal_attention(q[:, :, :1], k, v)
