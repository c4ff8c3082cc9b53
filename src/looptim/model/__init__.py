"""The looped language model and the parts of its backbone, each usable alone."""

from .attention import Attend, Attention, cached_attention, causal_attention, document_lengths, document_starts
from .block import Block
from .head import IGNORE, Head
from .layout import ATTENTION, AttentionKind, LayerSpec, Layout
from .lm import LoopedBody, LoopedLM, Output, auxiliary_loss
from .moe import Experts, MoE, MoEStats, Router, Routing, SwiGLU, balance_update
from .norm import RMSNorm
from .rope import apply_rope, rope_table

__all__ = [
    "ATTENTION",
    "IGNORE",
    "Attend",
    "Attention",
    "AttentionKind",
    "Block",
    "Experts",
    "Head",
    "LayerSpec",
    "Layout",
    "LoopedBody",
    "LoopedLM",
    "MoE",
    "MoEStats",
    "Output",
    "RMSNorm",
    "Router",
    "Routing",
    "SwiGLU",
    "apply_rope",
    "auxiliary_loss",
    "balance_update",
    "cached_attention",
    "causal_attention",
    "document_lengths",
    "document_starts",
    "rope_table",
]
