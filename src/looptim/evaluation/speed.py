"""Decoding speed in tokens per second, with exits against full depth."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..loading import wrap
from ..loop.depth import Exit
from ..model import LoopedLM
from ..model.count import count

BATCHES = (1, 8, 32)
ROUNDS = 3


@torch.no_grad()
def decoding_speed(model: LoopedLM, depth: Exit, tokens: Tensor, *, new: int = 24) -> dict[str, Any]:
    """Greedy decoding from the first halves of windows: medians over rounds in which all take turns.

    Beside full depth and `depth` there is `depth` with sequences that leave the batch. What FLOPs allow is by the mean
    loops of the tokens that were decoded.
    """
    wrapped = wrap(model)
    room = min(tokens.shape[1] // 2, model.config.max_length - new)
    prompts = tokens.repeat(-(-max(BATCHES) // len(tokens)), 1)[:, : max(room, 1)]
    seen: list[Tensor] = []
    handle = wrapped.register_forward_hook(lambda module, args, out: seen.extend(out.depth or ()))
    rows = {}
    policies = {"full": None, "compact": dataclasses.replace(depth, mode="compact"), "exits": depth}
    try:
        for batch in BATCHES:
            seconds: dict[str, list[float]] = {name: [] for name in policies}
            for _ in range(ROUNDS):
                for name, policy in policies.items():
                    wrapped.set_depth(policy)
                    seen.clear()
                    seconds[name].append(decode(wrapped, prompts[:batch], new))
            loops = torch.cat([each[:, -1] for each in seen[1:]]).double().mean().item() if len(seen) > 1 else None
            full, compact, exits = (sorted(each)[ROUNDS // 2] for each in seconds.values())
            made = batch * (new - 1)
            rows[str(batch)] = {
                "full tokens/s": made / full,
                "exits tokens/s": made / exits,
                "compact tokens/s": made / compact,
                "speed-up": full / exits,
                "compact speed-up": full / compact,
                "loops": loops,
                "theoretical": None if loops is None else flops_of(model.config, loops)["speed-up"],
            }
    finally:
        handle.remove()
        wrapped.set_depth(None)
    return rows


def decode(wrapped: Any, prompts: Tensor, new: int) -> float:
    """Seconds for the tokens after the first, which exclude the prompt."""
    out = wrapped(prompts, use_cache=True)
    token = out.logits[:, -1:].argmax(-1)
    start = time.perf_counter()
    for _ in range(new - 1):
        out = wrapped(token, past_key_values=out.past_key_values, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
    return time.perf_counter() - start


def flops_of(config: ModelConfig, loops: float) -> dict[str, float]:
    """A token's FLOPs at full depth and at a mean depth, head included, and the speed-up there could be.

    >>> round(flops_of(ModelConfig.tiny(layout="0-1x4-0"), 4.0)["speed-up"], 6)
    1.0
    """
    steps = next(segment.loops for segment in config.segments if segment.loops)
    # A transition that is shared over loops has the same parts at any number of them.
    full, one = (count(each).flop_conventions()["total"] for each in (config, config.with_loops(1)))
    per_loop = (full - one) / (steps - 1) if steps > 1 else 0.0
    spent = full - (steps - loops) * per_loop
    return {"full": full, "spent": spent, "speed-up": full / spent}
