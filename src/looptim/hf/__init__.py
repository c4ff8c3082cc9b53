"""The same model in transformers: one attention slot per unrolled layer, on the stock KV cache.

Importing it registers the Auto classes. Only this package imports transformers.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .config import LoopedConfig
from .decoder import LoopedDecoder, LoopedDecoderConfig
from .model import LoopedForCausalLM, LoopedModel
from .opening import open_folder
from .recirculate import recirculate
from .slots import AttentionSlot

__all__ = [
    "AttentionSlot",
    "LoopedConfig",
    "LoopedDecoder",
    "LoopedDecoderConfig",
    "LoopedForCausalLM",
    "LoopedModel",
    "open_folder",
    "recirculate",
]

AutoConfig.register(LoopedDecoderConfig.model_type, LoopedDecoderConfig)
AutoConfig.register(LoopedConfig.model_type, LoopedConfig)
AutoModel.register(LoopedConfig, LoopedModel)
AutoModelForCausalLM.register(LoopedConfig, LoopedForCausalLM)
