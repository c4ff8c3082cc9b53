"""Decoding speed in tokens per second, with exits against full depth."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ..loading import wrap
from ..loop.depth import Exit
from ..model import LoopedLM

BATCHES = (1, 8, 32)
ROUNDS = 3


@torch.no_grad()
def decoding_speed(model: LoopedLM, depth: Exit, tokens: Tensor, *, new: int = 24) -> dict[str, Any]:
    """Greedy decoding from the first halves of windows; medians over rounds in which both take turns."""
    wrapped = wrap(model)
    room = min(tokens.shape[1] // 2, model.config.max_length - new)
    prompts = tokens.repeat(-(-max(BATCHES) // len(tokens)), 1)[:, : max(room, 1)]
    seen: list[Tensor] = []
    handle = wrapped.register_forward_hook(lambda module, args, out: seen.extend(out.depth or ()))
    rows = {}
    try:
        for batch in BATCHES:
            seconds: dict[str, list[float]] = {"full": [], "exits": []}
            for _ in range(ROUNDS):
                for name, policy in (("full", None), ("exits", depth)):
                    wrapped.set_depth(policy)
                    seen.clear()
                    seconds[name].append(_decode(wrapped, prompts[:batch], new))
            loops = torch.cat([each[:, -1] for each in seen[1:]]).double().mean().item() if len(seen) > 1 else None
            full, exits = (sorted(each)[ROUNDS // 2] for each in seconds.values())
            made = batch * (new - 1)
            rows[str(batch)] = {
                "full tokens/s": made / full,
                "exits tokens/s": made / exits,
                "speed-up": full / exits,
                "loops": loops,
            }
    finally:
        handle.remove()
        wrapped.set_depth(None)
    return rows


def _decode(wrapped: Any, prompts: Tensor, new: int) -> float:
    """Seconds for the tokens after the first, which exclude the prompt."""
    out = wrapped(prompts, use_cache=True)
    token = out.logits[:, -1:].argmax(-1)
    start = time.perf_counter()
    for _ in range(new - 1):
        out = wrapped(token, past_key_values=out.past_key_values, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
    return time.perf_counter() - start
