"""What all looped models of transformers share: how they are built, loaded, initialized and told their depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from ..loop.depth import Depth, Fixed
from ..model import LoopedBody, LoopedLM
from .config import LoopedConfig
from .convert import check_fit, renamings

if TYPE_CHECKING:
    from .model import LoopedModel


class LoopedPreTrainedModel(PreTrainedModel):
    """What the bare body and the model with a head share."""

    config: LoopedConfig
    config_class = LoopedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # A loop passes its state on to itself and masks to its blocks, invisibly to hooks that would move them.
    _no_split_modules = ["LoopedModel"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # The router biases move in steps that bf16 cannot represent.
    _keep_in_fp32_modules_strict = ["feedforward.bias"]  # noqa: RUF012

    _parts: ClassVar[Mapping[str, str]] = {}
    """Children that are parts of a looptim model, and their names there."""

    @classmethod
    def from_looped(cls, looped: LoopedLM, *, loops: int | None = None, **kwargs: Any):
        """A wrapper around `looped`, whose weights are shared, not copied; `kwargs` go to the config.

        With fewer `loops` it is the assistant of the full model, for exact self-speculative decoding.
        """
        config = LoopedConfig.from_model_config(looped.config, loops=loops, **kwargs)
        config.dtype = looped.embedding.weight.dtype
        return cls(config, looped).train(looped.training)

    def set_loops(self, loops: int | None) -> None:
        """From now on, run a shared transition `loops` times; None restores the layout's number."""
        self.set_depth(None if loops is None else Fixed(loops))

    def set_depth(self, depth: Depth | None) -> None:
        """From now on, run every loop as deep as `depth` says; None restores the layout's depth.

        A saved config has the largest number of loops. A cache that was filled at another depth cannot be used again.
        """
        self.config.loops = cast("LoopedModel", self.base_model).build_slots(depth)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Resizing, PEFT and vLLM replace children, and the body must run the replacements.
        if name in self._parts:
            setattr(self.body, self._parts[name], value)

    @property
    def body(self) -> LoopedBody:
        """The looptim model that runs the parts."""
        return cast("LoopedModel", self.base_model)._body

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.body.config = self.config.to_model_config()
        return embedding

    def _set_gradient_checkpointing(self, enable: bool = True, **ignored: Any) -> None:
        cast("LoopedModel", self.base_model).gradient_checkpointing = self.body.checkpointing = enable

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialize only what a checkpoint lacks; a looptim model has its initial weights as soon as it is built."""
        body = self.body
        tensors = dict(body.named_parameters()) | dict(body.named_buffers())
        # transformers marks the weights that a checkpoint provided.
        done = {
            name for name, tensor in tensors.items() if tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)
        }
        lacking = tensors.keys() - done
        if lacking:
            with torch.device("cpu"):
                fresh = type(body)(body.config).state_dict()
            for name in lacking & fresh.keys():
                tensors[name].copy_(fresh[name])

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **kwargs: Any):
        # At this point the files are known and nothing is allocated yet. An adapter declares the weights it expects.
        whole = state_dict is None and not kwargs.get("expected_keys") and not load_config.is_quantized
        if whole and not load_config.ignore_mismatched_sizes:
            check_fit(model, checkpoint_files or [])
        if model.base_model is model:
            # Said here and not of the class: vLLM, which has the head elsewhere, would not load it either.
            model._keys_to_ignore_on_load_unexpected = {"^lm_head"}
        given = load_config.weight_mapping or []
        load_config = dataclasses.replace(load_config, weight_mapping=[*given, *renamings()])
        loaded = PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, **kwargs)
        # transformers reverts these renames when it saves, but an old export should be saved under the current names.
        model._weight_conversions = [used for used in getattr(model, "_weight_conversions", ()) if used in given]
        cast("LoopedModel", model.base_model).find_shifts()
        return loaded

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing, since transformers would copy this file into every saved folder, over the shim."""
