"""Grouped matmuls against a loop over experts, and the form that never waits for the device."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from looptim.model.grouped import blocked_linear, blocked_outer, grouped_linear, grouped_outer, sum_rows, take_rows

ENDS = [[0, 70, 70, 200, 333], [333, 333, 333, 333, 333], [64, 128, 192, 256, 333]]


def operands(ends):
    generator = torch.Generator().manual_seed(0)
    shapes = (333, 6), (len(ends), 4, 6), (333, 4)
    x, weight, left = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return x, weight, left, torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("linear", "outer"), [(grouped_linear, grouped_outer), (blocked_linear, blocked_outer)])
def test_each_row_meets_the_matrix_of_its_expert(ends, linear, outer):
    x, weight, left, stops = operands(ends)
    pairs = list(zip([0, *ends[:-1]], ends, strict=True))
    rows = torch.cat([x[a:b] @ weight[e].T for e, (a, b) in enumerate(pairs)])
    matrices = torch.stack([left[a:b].T @ x[a:b] for a, b in pairs])
    torch.testing.assert_close(linear(x, weight, stops), rows)
    torch.testing.assert_close(outer(left, x, stops), matrices)


def test_blocks_never_ask_for_a_value():
    # A fake tensor has no values: whatever would wait for a device to give one fails.
    with FakeTensorMode() as fake:
        x, weight, left, ends = (fake.from_tensor(tensor) for tensor in operands(ENDS[0]))
        assert blocked_linear(x, weight, ends).shape == (333, 4)
        assert blocked_outer(left, x, ends).shape == (5, 4, 6)
        with pytest.raises(Exception, match=r"aten\._local_scalar_dense|tolist|data-dependent"):
            ends.tolist()


@pytest.mark.long
def test_operators_are_well_formed():
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    torch.library.opcheck(torch.ops.looptim.grouped_linear, (x, weight, ends))
    torch.library.opcheck(torch.ops.looptim.grouped_outer, (x, torch.randn(5, 4, requires_grad=True), ends))


def test_sum_rows_is_the_adjoint_of_take_rows():
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    places = order.argsort()
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    y = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(take_rows(x, order, places, 3), x[order // 3])
    expected = torch.zeros_like(x).index_add(0, order // 3, y)
    torch.testing.assert_close(sum_rows(y, order, places, 3), expected)
    assert torch.autograd.gradcheck(lambda x: take_rows(x, order, places, 3), x)
    assert torch.autograd.gradcheck(lambda y: sum_rows(y, order, places, 3), y)
