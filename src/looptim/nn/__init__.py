"""Parts of the backbone: torch only, each usable alone."""

from .attention import Attend, Attention, CausalSlot, causal_attention
from .block import Block
from .head import IGNORE, Head
from .moe import Experts, MoE, MoEStats, Router, Routing, SwiGLU, balance_update
from .norm import RMSNorm
from .rope import apply_rope, rope_table

__all__ = [
    "IGNORE",
    "Attend",
    "Attention",
    "Block",
    "CausalSlot",
    "Experts",
    "Head",
    "MoE",
    "MoEStats",
    "RMSNorm",
    "Router",
    "Routing",
    "SwiGLU",
    "apply_rope",
    "balance_update",
    "causal_attention",
    "rope_table",
]
