"""A pseudo-random permutation of any size, computed per element, so that no order is ever stored."""

from __future__ import annotations

import hashlib
import math

import numpy as np

_ROUNDS = 8


def permute(index: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:
    """The place of each `index` of `range(size)` in the permutation given by (seed, epoch).

    A Feistel network on the pairs Z_a × Z_b, ab ≥ size: each round adds to one half a hash of the other, which is
    undone by subtracting it, so the network is a bijection. Pairs beyond `size` walk on until they are inside.

    >>> sorted(permute(np.arange(5), size=5, seed=0, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    a = max(math.isqrt(size - 1) + 1, 1)
    b = -(-size // a)
    key = hashlib.blake2b(f"{seed}:{epoch}:{size}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(key, dtype="<u8")
    moved = _network(np.asarray(index, dtype=np.uint64), a, b, keys)
    while (outside := moved >= size).any():
        moved[outside] = _network(moved[outside], a, b, keys)
    return moved.astype(np.int64)


def _network(index: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    left, right = index // np.uint64(b), index % np.uint64(b)
    for number, key in enumerate(keys):
        if number % 2:
            left = (left + _mix(right ^ key) % np.uint64(a)) % np.uint64(a)
        else:
            right = (right + _mix(left ^ key) % np.uint64(b)) % np.uint64(b)
    return left * np.uint64(b) + right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64; it relies on uint64 arrays wrapping around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
