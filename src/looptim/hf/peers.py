"""Other people's models of equal size: what training, prefill and decoding are measured against."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ..config import ModelConfig
from ..model import Layout, LoopedLM

SHARED: dict[str, Any] = {"width": 256, "vocab_size": 4096, "tied": True, "heads": 8, "kv_heads": 2, "head_dim": 32}
SHARED |= {"pattern": "F", "sliding_rotary": 32, "full_rotary": 32}
"""What both models of ours have in common."""

DENSE: dict[str, Any] = {**SHARED, "layout": "2-2x3-2", "max_length": 1024, "dense_layers": 6, "dense_hidden": 768}
DENSE |= {"loop": {"preset": "operloop"}}
"""A dense model that attends to everything, as Qwen3 does."""

MYTHOS: dict[str, Any] = {**SHARED, "layout": "1-1x6-0", "max_length": 512, "qk_norm": False, "dense_layers": 1}
MYTHOS |= {"dense_hidden": 341, "experts": 16, "top_k": 4, "expert_hidden": 64, "shared_hidden": 256}
MYTHOS |= {"loop": {"preset": "operloop", "options": {"shared": True}}}
"""A dense prelude and a block of experts in a loop, in the sizes that open-mythos gives them."""


def glm4_moe(config: ModelConfig) -> Glm4MoeForCausalLM:
    """Glm4Moe with the widths of `config` and a layer of its own for every unrolled one."""
    shape = Glm4MoeConfig(
        **_shared(config),
        intermediate_size=config.dense_hidden,
        moe_intermediate_size=config.expert_hidden,
        n_routed_experts=config.experts,
        num_experts_per_tok=config.top_k,
        n_shared_experts=1,
        first_k_dense_replace=config.dense_layers,
        use_qk_norm=config.qk_norm,
        n_group=1,
        topk_group=1,
    )
    return Glm4MoeForCausalLM(shape).eval()


def qwen3(config: ModelConfig) -> Qwen3ForCausalLM:
    """Qwen3 with the widths of a dense `config` and a layer of its own for every unrolled one."""
    return Qwen3ForCausalLM(Qwen3Config(**_shared(config), intermediate_size=config.dense_hidden)).eval()


def _shared(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(Layout.of(config).layers),
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tied,
        "eos_token_id": None,
    }


def open_mythos(config: ModelConfig) -> nn.Module | None:
    """open-mythos with the widths of `config`, a prelude and one block in a loop; None where it is not installed."""
    try:
        theirs: Any = importlib.import_module("open_mythos")
    except ModuleNotFoundError:
        return None
    prelude, looped = config.segments[0], config.segments[1]
    assert looped.loops is not None
    return theirs.OpenMythos(
        theirs.MythosConfig(
            vocab_size=config.vocab_size,
            dim=config.width,
            n_heads=config.heads,
            n_kv_heads=config.kv_heads,
            max_seq_len=config.max_length,
            max_loop_iters=looped.loops,
            prelude_layers=prelude.blocks,
            coda_layers=0,
            attn_type="gqa",
            n_experts=config.experts,
            n_shared_experts=1,
            n_experts_per_tok=config.top_k,
            expert_dim=config.expert_hidden,
            # Nothing halts, so that both run all loops.
            act_threshold=1.1,
        )
    )


def training_call(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """Forward and backward of the next-token loss, as each library computes it."""

    def run() -> None:
        model.zero_grad()
        if isinstance(model, LoopedLM):
            loss = model.loss(tokens, tokens).loss
        elif isinstance(model, Glm4MoeForCausalLM | Qwen3ForCausalLM):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        else:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()

    return run


def prefill_call(model: Any, prompt: Tensor) -> Callable[[], None]:
    """Reading a prompt into a cache, with the logits of the last token."""
    return torch.inference_mode()(lambda: model(prompt, use_cache=True, logits_to_keep=1))
