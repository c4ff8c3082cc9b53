"""Maps are linear where they say so, and `write` is the adjoint of `read`."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from looptim.loop import maps

B, T, R, D = 2, 4, 3, 5


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


MAPS = {
    "Identity": lambda: (maps.Identity(), 1),
    "Diagonal": lambda: (maps.Diagonal(normal(D)), 1),
    "Diagonal per token": lambda: (maps.Diagonal(normal(B, T, D)), 1),
    "Dense": lambda: (maps.Dense(normal(D, D)), 1),
    "Streams": lambda: (maps.Streams(normal(B, T, R)), R),
    "Shift": lambda: (maps.Shift(), 1),
    "Composed": lambda: (maps.Composed(maps.Diagonal(normal(B, T, D)), maps.Dense(normal(D, D))), 1),
    "Composed over streams": lambda: (maps.Composed(maps.Dense(normal(D, D)), maps.Streams(normal(B, T, R))), R),
    "Composed with Shift": lambda: (maps.Composed(maps.Dense(normal(D, D)), maps.Shift()), 1),
}


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(sorted(MAPS)), seed=st.integers(0, 2**31))
def test_write_is_the_adjoint_of_read(name, seed):
    torch.manual_seed(seed)
    map, r = MAPS[name]()
    Y, g = normal(B, T, r, D), normal(B, T, D)
    torch.testing.assert_close((map.read(Y) * g).sum(), (Y * map.write(g)).sum())


@pytest.mark.parametrize("name", MAPS)
def test_write_equals_autograd_of_read(name):
    map, r = MAPS[name]()
    Y, g = normal(B, T, r, D).requires_grad_(), normal(B, T, D)
    torch.testing.assert_close(map.write(g), torch.autograd.grad(map.read(Y), Y, g)[0])


def test_pullback_is_the_vjp_and_lets_training_through():
    h = normal(B, T, R).requires_grad_()
    Y, g = normal(B, T, R, D).requires_grad_(), normal(B, T, D)

    def fn(Y):
        return torch.tanh((h.unsqueeze(-1) * Y).sum(-2))

    written = maps.Pullback(fn, Y).write(g)
    torch.testing.assert_close(written, torch.autograd.grad(fn(Y), Y, g)[0])
    # Written out by hand, J^T g = h (1 - tanh^2) g, so that the second derivative is checked against another form.
    by_hand = h.unsqueeze(-1) * ((1 - fn(Y) ** 2) * g).unsqueeze(-2)
    for got, wanted in zip(
        torch.autograd.grad(written.square().sum(), (Y, h)),
        torch.autograd.grad(by_hand.square().sum(), (Y, h)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_pullback_works_without_gradients():
    Y = normal(B, T, 1, D)
    with torch.inference_mode():
        assert maps.Pullback(lambda Y: Y.squeeze(-2) ** 2, Y).write(torch.ones(B, T, D)).shape == Y.shape


def test_autocast_leaves_the_state_its_dtype():
    map = maps.Dense(torch.randn(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert map.read(torch.randn(1, 2, 1, 4)).dtype == map.write(torch.randn(1, 2, 4)).dtype == torch.float32


def test_only_a_shift_writes_to_the_past():
    assert maps.Identity().causal
    assert not maps.Shift().causal
    assert not maps.Composed(maps.Identity(), maps.Shift()).causal


@pytest.mark.parametrize("map", [maps.Identity(), maps.Diagonal(torch.ones(D)), maps.Dense(torch.eye(D)), maps.Shift()])
def test_a_vector_map_refuses_streams(map):
    with pytest.raises(ValueError, match="vector state"):
        map.read(torch.zeros(B, T, R, D))


def test_streams_refuse_another_number_of_streams():
    with pytest.raises(ValueError, match="reads 3 streams, but the state has 2"):
        maps.Streams(torch.zeros(B, T, 3)).read(torch.zeros(B, T, 2, D))


def test_maps_compose_with_an_operator():
    a, W, Y, g = torch.randn(4), torch.randn(4, 4), torch.randn(2, 3, 1, 4), torch.randn(2, 3, 4)
    both, written_out = maps.Diagonal(a) @ maps.Dense(W), maps.Composed(maps.Diagonal(a), maps.Dense(W))
    assert torch.equal(both.read(Y), written_out.read(Y))
    assert torch.equal(both.write(g), written_out.write(g))
