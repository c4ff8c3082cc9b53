"""Building the parts of a model from its config, and the seeds of its initial weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from ..config import ModelConfig
from ..loop import Loop
from ..loop.registry import build_named, options_of
from .attention import Attention
from .block import Block
from .layout import LayerSpec
from .moe import MoE, SwiGLU


def build_loop(config: ModelConfig, loops: int | None) -> Loop:
    assert loops is not None
    for name in sorted(config.loop.options.keys() & {"name", "width", "steps"}):
        source = {"name": "loop.preset", "width": "model.width", "steps": "model.layout"}[name]
        raise ValueError(f"{name} is not an option of a loop; it is set by {source}")
    # A norm inside a transition uses the model's epsilon, like any other norm.
    eps = {"norm_eps": config.norm_eps} if "norm_eps" in options_of(config.loop.preset) else {}
    loop = build_named(config.loop.preset, width=config.width, steps=loops, **eps | config.loop.options)
    loop.set_form("fused" if config.loop.fused else "readable")
    return loop


def build_block(config: ModelConfig, layer: LayerSpec, visits: int) -> Block:
    attention = Attention(
        config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        qk_norm=config.qk_norm,
        norm_eps=config.norm_eps,
    )
    if layer.feedforward == "dense":
        feedforward = SwiGLU(config.width, config.dense_hidden)
    else:
        feedforward = MoE(
            config.width,
            experts=config.experts,
            top_k=config.top_k,
            expert_hidden=config.expert_hidden,
            shared_hidden=config.shared_hidden,
            scaling=config.routed_scaling,
            biases=visits if config.balance == "per_visit" else 1,
            routers=visits if config.router == "per_visit" else 1,
        )
    return Block(attention, feedforward, width=config.width, eps=config.norm_eps)


def seeded(seed: int, name: str, make: Callable[[], Loop]) -> Loop:
    # torch.manual_seed seeds every device, so the generator of each device is restored.
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        torch.manual_seed(derive(seed, name))
        return make()


def draw_seed() -> int:
    return int(torch.randint(2**31, (), device="cpu"))


def derive(seed: int, name: str) -> int:
    """The seed for one named parameter or part."""
    return zlib.crc32(f"{seed}/{name}".encode())
