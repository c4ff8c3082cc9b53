"""RoPE against complex multiplication."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from looptim.model import apply_rope, rope_table
from looptim.model.rope import rotate_by_formula


def by_complex_numbers(x, positions, rotary_width, theta):
    """Each pair (i, i + half) is one complex number, multiplied by exp(i angle)."""
    half = rotary_width // 2
    frequencies = torch.tensor([theta ** (-2 * i / rotary_width) for i in range(half)], dtype=torch.float64)
    angles = positions.double().unsqueeze(-1) * frequencies
    turn = torch.polar(torch.ones_like(angles), angles)
    if positions.ndim == 2:
        turn = turn.unsqueeze(1)
    z = torch.complex(x[..., :half].double(), x[..., half:rotary_width].double()) * turn
    return torch.cat([z.real, z.imag, x[..., rotary_width:].double()], dim=-1)


@pytest.mark.parametrize("rotary_width", [2, 6, 8])
@pytest.mark.parametrize("batched", [False, True])
def test_value_and_gradient(rotary_width, batched):
    positions = torch.randint(0, 50, (3, 7)) if batched else torch.arange(7)
    x = torch.randn(3, 7, 4, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
    y = apply_rope(x, *rope_table(positions, rotary_width, 100.0))
    expected = by_complex_numbers(x, positions, rotary_width, 100.0)
    assert y.dtype == torch.float64
    # The tables are fp32: angles up to 50 carry errors up to 50 * 2^-24.
    torch.testing.assert_close(y, expected, rtol=0, atol=2e-5)
    weight = torch.randn_like(y)
    (got,) = torch.autograd.grad((y * weight).sum(), x)
    (want,) = torch.autograd.grad((expected * weight).sum(), x)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_eager_form_equals_compiled_form(dtype):
    x = torch.randn(2, 3, 5, 8, dtype=dtype)
    table = rope_table(torch.arange(5), 6, 1e4)
    y = apply_rope(x, *table)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y, rotate_by_formula(x, *table), rtol=1e-6 if dtype != torch.bfloat16 else 0.01, atol=1e-6
    )


def test_gradients_are_exact():
    table = rope_table(torch.arange(4), 4, 1e4)
    x = torch.randn(1, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, *table), x)
    assert torch.autograd.gradgradcheck(lambda x: apply_rope(x, *table), x)


def test_scores_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).expand(2, 1, 1, 40, 16)
    table = rope_table(torch.arange(40), 16, 1e4)
    scores = (apply_rope(q, *table) @ apply_rope(k, *table).transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores[5:, 5:], scores[:-5, :-5], rtol=0, atol=1e-4)
    assert (scores[0, 0] - scores[9, 0]).abs() > 1e-3


def test_position_zero_and_the_rest_pass_through():
    x = torch.randn(1, 2, 3, 8)
    y = apply_rope(x, *rope_table(torch.arange(3), 4, 1e4))
    assert torch.equal(y[:, :, 0], x[:, :, 0])
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert not torch.equal(y[:, :, 1:, :4], x[:, :, 1:, :4])


def test_input_is_not_modified():
    x = torch.randn(1, 1, 4, 4)
    before = x.clone()
    apply_rope(x, *rope_table(torch.arange(4), 4, 1e4))
    assert torch.equal(x, before)


def test_bad_widths():
    with pytest.raises(ValueError, match="even"):
        rope_table(torch.arange(3), 5, 1e4)
    with pytest.raises(ValueError, match="head dim"):
        apply_rope(torch.randn(1, 1, 3, 4), *rope_table(torch.arange(3), 8, 1e4))


def test_nothing_of_a_fake_update_is_kept_for_the_next():
    expected = None
    for _ in range(2):
        with FakeTensorMode():
            rope_table(torch.arange(5), rotary_width=6, theta=123.0)
        found = rope_table(torch.arange(5), rotary_width=6, theta=123.0)
        expected = found if expected is None else expected
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
