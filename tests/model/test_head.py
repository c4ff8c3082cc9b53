"""The loss of the head against the plain form."""

import pytest
import torch
import torch.nn.functional as F

from looptim.model import IGNORE, Head


@pytest.fixture
def head():
    torch.manual_seed(0)
    return Head(4, vocab_size=7, chunk=3).double()


def targets():
    y = torch.randint(7, (2, 5))
    y[0, 1] = y[1, 4] = IGNORE
    return y


def test_gradients_are_those_of_the_plain_form_over_chunks_and_ignored_targets(head):
    h, y = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True), targets()
    plain = F.cross_entropy(F.linear(h, head.weight).flatten(0, 1), y.flatten(), ignore_index=IGNORE)
    loss = head(h, y)
    torch.testing.assert_close(loss, plain)
    expected = torch.autograd.grad(5 * plain, (h, head.weight))
    for got, wanted in zip(torch.autograd.grad(5 * loss, (h, head.weight)), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_negative_target_is_not_taken_for_token_0(head):
    with pytest.raises((RuntimeError, IndexError)):
        head(torch.randn(1, 2, 4, dtype=torch.float64), torch.tensor([[-1, 3]]))


def test_a_second_derivative_is_refused_rather_than_wrong(head):
    h = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(head(h.tanh(), torch.tensor([[1, 3]])), h, create_graph=True)
