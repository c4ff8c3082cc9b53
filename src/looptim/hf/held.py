"""The keys and values of tokens that skip visits to the layers of a foreign decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..loop.walk import Walk


class HeldCache:
    """Wraps a cache, or None: tokens that have left the loop keep the keys and values of their last visit.

    k_{l,i} = k_{tau_i,i} and v_{l,i} = v_{tau_i,i} for the visits l > tau_i that token i skips, as in our own models
    (docs/depth.md). Attention of transformers hands its keys and values to the cache, which is where they are held.
    """

    def __init__(self, cache: Any, walk: Walk, blocks: Mapping[int, int]):
        self.__dict__.update(cache=cache, walk=walk, blocks=blocks, last={})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Cache keys and values and return all that a layer attends to; tokens that skip the visit keep their last."""
        live, block = self.walk.live, self.blocks[layer_idx]
        if isinstance(live, Tensor) and block in self.last:
            inside = live.reshape(*live.shape, *[1] * (2 - live.dim()))[:, None, :, None]
            held_key, held_value = self.last[block]
            key, value = torch.where(inside, key, held_key), torch.where(inside, value, held_value)
        self.last[block] = (key, value)
        return (key, value) if self.cache is None else self.cache.update(key, value, layer_idx, *given, **named)

    def skip(self, places: Iterable[int]) -> None:
        """Fill the places of the cache that no token visits with the keys and values that are kept."""
        cache = self.cache
        for place in places if cache is not None else ():
            assert cache is not None
            cache.update(*self.last[self.blocks[place]], place)
