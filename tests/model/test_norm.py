"""RMSNorm against its formula."""

import pytest
import torch

from looptim.model import RMSNorm


def naive(x, gain, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + gain)


def norm_with_gain(width, dtype=torch.float32, eps=1e-5):
    norm = RMSNorm(width, eps).to(dtype)
    torch.nn.init.normal_(norm.gain)
    return norm


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 4, 8), (0, 5)])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_value_and_gradient_in_float64(shape, eps):
    norm = norm_with_gain(shape[-1], torch.float64, eps)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y, expected = norm(x), naive(x, norm.gain, eps)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(y)
    got = torch.autograd.grad((y * weight).sum(), [x, norm.gain])
    want = torch.autograd.grad((expected * weight).sum(), [x, norm.gain])
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_differentiates_twice():
    norm = norm_with_gain(5, torch.float64, eps=0.1)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: norm(x), x)


def test_gain_starts_at_zero_and_output_has_unit_rms():
    norm = RMSNorm(64)
    assert norm.gain.eq(0).all()
    y = norm(torch.randn(10, 64) * 100)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(10), rtol=1e-5, atol=0)


def test_zero_input_has_finite_gradient():
    norm = RMSNorm(4)
    x = torch.zeros(2, 4, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.isfinite().all()


def test_bf16_is_computed_in_fp32():
    norm = norm_with_gain(128)
    x = torch.randn(50, 128).bfloat16()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    # One rounding at the end, half a unit in the last place.
    torch.testing.assert_close(y.float(), naive(x.float(), norm.gain, 1e-5), rtol=1.01 * 2**-8, atol=0)
    # Squares of these overflow fp16.
    big = torch.full((1, 128), 300.0, dtype=torch.float16)
    assert torch.allclose(RMSNorm(128)(big).float(), torch.ones(1, 128), atol=1e-3)
