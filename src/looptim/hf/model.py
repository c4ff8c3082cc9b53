"""`LoopedLM` as a model of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sliding_window_overlay
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple

from ..loop import Loop
from ..loop.depth import Fixed
from ..model import AttentionKind, Head, Layout, LoopedLM, MoEStats, auxiliary_loss
from .config import LoopedConfig
from .convert import check_fit
from .slots import AttentionSlot

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class LoopedModel(PreTrainedModel):
    """`LoopedLM` under transformers, up to the coda's norm. `looped` is the model, and has all the weights."""

    config: LoopedConfig
    config_class = LoopedConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # A loop hands its state on to itself and masks to its blocks, out of sight of hooks that would move them.
    _no_split_modules = ["LoopedLM"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # The router's biases move in steps that bf16 cannot hold.
    _keep_in_fp32_modules_strict = ["feedforward.bias"]  # noqa: RUF012
    _tied_weights_keys = {"looped.head.weight": "looped.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LoopedConfig, looped: LoopedLM | None = None):
        super().__init__(config)
        self.looped = LoopedLM(config.to_model_config()) if looped is None else looped
        for tensor in (*self.looped.parameters(), *self.looped.buffers()):
            cast(Any, tensor)._is_hf_initialized = not tensor.is_meta
        self.gradient_checkpointing = False
        self.slots = self._build_slots(config.loops)
        self.post_init()

    @classmethod
    def from_looped(cls, looped: LoopedLM, *, loops: int | None = None, **kwargs: Any):
        """A wrapper around `looped` itself, whose weights are shared, not copied; `kwargs` go to the config.

        With fewer `loops` it is the assistant of the full model, for exact self-speculative decoding.
        """
        config = LoopedConfig.from_model_config(looped.config, loops=loops, **kwargs)
        config.dtype = looped.embedding.weight.dtype
        return cls(config, looped).train(looped.training)

    def set_loops(self, loops: int | None) -> None:
        """Run a shared transition `loops` times from now on; None is what the layout says."""
        self.slots = self._build_slots(loops)
        self.config.loops = loops

    def _build_slots(self, loops: int | None) -> nn.ModuleList:
        if loops is not None:
            if not self.looped.loops:
                raise ValueError(f"layout {self.config.layout!r} has no looped segment, so loops={loops} cannot be set")
            for loop in self.looped.loops:
                Fixed(loops).count_steps(cast(Loop, loop), 1)
        self._loops = loops
        config = self.looped.config if loops is None else self.looped.config.with_loops(loops)
        layers = Layout.of(config).layers
        return nn.ModuleList(AttentionSlot(self.config, i, layer.attention) for i, layer in enumerate(layers))

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "*B T"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T d"] | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The normed output of the coda."""
        hidden, _, rest = self._run(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return BaseModelOutputWithPast(last_hidden_state=cast(Any, hidden), **rest)

    def _run(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        *,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "*B T"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T d"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, list[tuple[int, MoEStats]], dict[str, Any]]:
        """The normed output of the coda, what the MoE layers tell, and the fields that every output has."""
        if self.config.loops != self._loops:
            raise ValueError(f"config.loops was changed to {self.config.loops}; call set_loops({self.config.loops})")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both")
        # Continuous batching brings its own cache.
        use_cache = self._resolve_cache(use_cache, kwargs.get("cache") if past_key_values is None else past_key_values)
        if self.shifted and isinstance(attention_mask, Tensor) and not attention_mask[..., 0].all():
            raise ValueError(
                "with token_shift=True the first token would read its padding; pad on the right, or not at all"
            )
        if inputs_embeds is None:
            assert input_ids is not None
            self.looped.check_vocabulary(input_ids)
            inputs_embeds = cast(Tensor, self.looped.embedding(input_ids))
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        masks = self._masks(inputs_embeds, attention_mask, position_ids, past_key_values)
        if position_ids is None:
            position_ids = _positions(inputs_embeds, attention_mask, past_key_values)
        self._check_length(position_ids)
        wants = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Tensor] | None = [inputs_embeds] if wants else None
        wants = self.config.output_attentions if output_attentions is None else output_attentions
        # Attention that cannot give its weights gives None, with the warning of transformers.
        weights: list[Tensor] | None = [] if wants else None
        kwargs = kwargs | {"output_attentions": True} if wants else kwargs
        attend = [
            functools.partial(
                slot,
                attention_mask=masks[slot.kind.name],
                # Flash attention sees packed sequences by their positions.
                position_ids=position_ids,
                past_key_values=past_key_values,
                weights=weights,
                **kwargs,
            )
            for slot in cast("list[AttentionSlot]", self.slots)
        ]
        observe = None if states is None else states.append
        depth = None if self.config.loops is None else Fixed(self.config.loops)
        hidden, stats = self.looped.hidden(
            inputs_embeds, positions=position_ids, attend=attend, depth=depth, observe=observe
        )
        rest = {
            "past_key_values": past_key_values if use_cache else None,
            # As everywhere in transformers, the last state is the normed one.
            "hidden_states": None if states is None else (*states[:-1], hidden),
            "attentions": None if weights is None else tuple(weights),
        }
        return hidden, stats, rest

    def _resolve_cache(self, use_cache: bool | None, past_key_values: Any) -> bool:
        """Whether to cache; refused where it is asked for and would be wrong."""
        shifted, narrow, recomputed = self.shifted, self._narrow, self.looped.checkpointing and torch.is_grad_enabled()
        asked = past_key_values is not None or bool(use_cache)
        if shifted and asked:
            raise ValueError(
                "a transition with token_shift=True reads the state of the token before, which no KV cache holds; "
                "pass use_cache=False"
            )
        if narrow and asked:
            raise ValueError("the caches of transformers do not hold a window of 1 token; pass use_cache=False")
        if recomputed and past_key_values is not None:
            raise ValueError(
                "gradient checkpointing runs layers twice, which would enter them twice in past_key_values; "
                "call gradient_checkpointing_disable() or leave past_key_values out"
            )
        default = self.config.use_cache and not self.training
        return (default if use_cache is None else use_cache) and not (shifted or narrow or recomputed)

    @property
    def caches(self) -> bool:
        """Whether decoding through a KV cache is possible."""
        return not (self.shifted or self._narrow)

    @property
    def shifted(self) -> bool:
        """Whether a token reads the state of the one before, which padding on the left would change."""
        return any(getattr(module, "mixes_tokens", False) for module in self.looped.loops.modules())

    @property
    def _narrow(self) -> bool:
        return self.config.sliding_window == 1 and any(slot.sliding_window for slot in self.slots)

    def _masks(
        self,
        inputs_embeds: Tensor,
        attention_mask: Any,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
    ) -> Mapping[str, Any]:
        """The mask of each kind of layer. `generate` and continuous batching come with masks already made."""
        if isinstance(attention_mask, Mapping):
            return attention_mask
        return {
            kind.name: _mask_of(kind)(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for kind in {cast(AttentionKind, slot.kind) for slot in self.slots}
        }

    def create_masks_for_generate(
        self, *, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Cache | None, **others: Any
    ) -> Mapping[str, Any]:
        """The masks of a compiled decode step, which `generate` makes outside of it."""
        return self._masks(inputs_embeds, attention_mask, others.get("position_ids"), past_key_values)

    def _check_length(self, position_ids: Tensor) -> None:
        # On a GPU the check would wait for the device.
        if position_ids.device.type == "cpu" and not torch.compiler.is_compiling() and position_ids.numel():
            length, limit = int(position_ids.max()) + 1, self.config.max_position_embeddings
            if length > limit:
                raise ValueError(f"the sequence has {length} tokens, but max_position_embeddings is {limit}")

    def get_input_embeddings(self) -> nn.Module:
        return self.looped.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.looped.embedding = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Module:
        return self.looped.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.looped.head = cast(Head, new_embeddings)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.looped.config = self.config.to_model_config()
        return embedding

    def _get_resized_lm_head(self, old_lm_head: Any, new_num_tokens: int | None = None, **options: Any) -> Any:
        # transformers resizes linear layers only.
        linear = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False, device="meta")
        linear.weight = old_lm_head.weight
        resized = super()._get_resized_lm_head(linear, new_num_tokens, **options)
        with torch.device("meta"):
            head = Head(self.config.hidden_size, vocab_size=resized.weight.shape[0], chunk=old_lm_head.chunk)
        head.weight = cast(nn.Parameter, resized.weight)
        # Or a later post_init would take it for a weight that no checkpoint brought.
        cast(Any, head.weight)._is_hf_initialized = True
        return head

    def _set_gradient_checkpointing(self, enable: bool = True, **ignored: Any) -> None:
        self.gradient_checkpointing = self.looped.checkpointing = enable

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Only what a checkpoint lacks: a `LoopedLM` is initialised as it is built, part by part."""
        tensors = dict(self.looped.named_parameters()) | dict(self.looped.named_buffers())
        # transformers marks what a checkpoint brought.
        done = {
            name for name, tensor in tensors.items() if tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)
        }
        lacking = tensors.keys() - done
        if lacking:
            with torch.device("cpu"):
                fresh = LoopedLM(self.looped.config).state_dict()
            for name in lacking & fresh.keys():
                tensors[name].copy_(fresh[name])

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **kwargs: Any):
        # Here the files are known and nothing is allocated yet. An adapter says what it expects.
        whole = state_dict is None and not kwargs.get("expected_keys") and not load_config.is_quantized
        if whole and not load_config.ignore_mismatched_sizes:
            check_fit(model, checkpoint_files or [])
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing: transformers would copy this file into every saved folder, where the shim is."""


class LoopedForCausalLM(LoopedModel, GenerationMixin):
    """`LoopedLM` under transformers, with its head: generation, Trainer, PEFT, lm-eval."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "*B T"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T d"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Logits in fp32; with `labels`, the next-token loss, in training plus the weighted auxiliary loss."""
        hidden, stats, rest = self._run(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.looped.head(hidden[:, kept])
        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            aux_loss = auxiliary_loss(stats)
            if aux_loss is not None and self.training:
                loss = loss + self.config.router_aux_loss_coef * aux_loss
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=cast(Any, aux_loss), logits=logits, **rest)


def _mask_of(kind: AttentionKind) -> Callable[..., Any]:
    """What makes the mask of a kind of layer."""
    if kind.name == "sliding_attention":
        return create_sliding_window_causal_mask
    if kind.window is None:
        return create_causal_mask
    # The caches of transformers know one window; a layer with another is cached whole.
    return functools.partial(create_causal_mask, and_mask_function=sliding_window_overlay(kind.window))


def _positions(inputs_embeds: Tensor, attention_mask: Any, past_key_values: Cache | None) -> Int[Tensor, "*B T"]:
    """Where the new tokens stand: padding on the left does not count."""
    length = inputs_embeds.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    return (torch.arange(length, device=inputs_embeds.device) + past).unsqueeze(0)
