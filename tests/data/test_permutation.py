import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from looptim.data.permutation import permute


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 2**20))
def test_every_index_comes_once(size, seed, epoch):
    order = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_an_element_does_not_depend_on_the_others_asked_for():
    whole = permute(np.arange(1000), size=1000, seed=3, epoch=1)
    assert permute(np.array([17]), size=1000, seed=3, epoch=1) == whole[17]


def test_it_works_where_no_order_could_be_stored():
    size = 10**15
    moved = permute(np.array([0, 1, size - 1]), size=size, seed=0, epoch=0)
    assert len(set(moved.tolist())) == 3
    assert ((moved >= 0) & (moved < size)).all()


def test_seed_and_epoch_change_the_order_and_it_looks_random():
    size = 2000
    orders = [
        permute(np.arange(size), size=size, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    for i, order in enumerate(orders):
        # Of a random permutation: one fixed point, correlation of the order 1 / sqrt(size), neighbors far apart.
        assert (order == np.arange(size)).sum() < 8
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.1
        assert abs(np.abs(np.diff(order)).mean() / (size / 3) - 1) < 0.1
        for other in orders[:i]:
            assert (order == other).sum() < 8
