"""Small models for the tests of the transformers adapter."""

import torch

from looptim.config import ModelConfig
from looptim.hf import LoopedForCausalLM
from looptim.model.lm import LoopedLM

SHARED = {"preset": "operloop", "options": {"shared": True}}


def tiny_config(preset="operloop", **changes) -> ModelConfig:
    """Sliding and full layers, dense and MoE blocks, and a window that is soon left behind."""
    values = {"layout": "4" if preset == "none" else "1-2x3-1", "loop": {"preset": preset}, "vocab_size": 64}
    values |= {"max_length": 64, "tied": False, "heads": 4, "kv_heads": 2, "head_dim": 8, "window": 5}
    values |= {"sliding_rotary": 8, "full_rotary": 4, "dense_hidden": 48, "init_std": 0.1}
    return ModelConfig.tiny(**values | changes)


def looped(preset="operloop", **changes) -> LoopedLM:
    """In eval mode; every weight and buffer is moved off its initial value, so that none is without effect."""
    model = LoopedLM(tiny_config(preset, **changes), seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    return model


def wrapped(preset="operloop", **changes) -> LoopedForCausalLM:
    return LoopedForCausalLM.from_looped(looped(preset, **changes))


def tokens(batch=2, length=20, seed=0) -> torch.Tensor:
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(seed))
