"""`LoopedLM` as a model of transformers: a body, `model`, and a head, `lm_head`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.utils.generic import can_return_tuple

from ..loop import Loop, mixes_tokens
from ..loop.depth import Depth, Fixed, PerSequence, PerToken
from ..model import AttentionKind, Head, Layout, LoopedBody, LoopedLM, auxiliary_loss
from ..model.alone import lay_together
from .config import LoopedConfig
from .outputs import LoopedCausalLMOutput, LoopedModelOutput
from .pretrained import LoopedPreTrainedModel
from .slots import AttentionSlot, Unmasked, depth_of_call, make_masks, make_positions, needs_no_mask, window_of

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class LoopedModel(LoopedPreTrainedModel):
    """The body: embedding, prelude, loop, coda, norm. Its children are the parts of `body`, which runs them."""

    _parts = {"embed_tokens": "embedding", "loops": "loops", "blocks": "blocks", "norm": "norm"}  # noqa: RUF012

    _body: LoopedBody

    def __init__(self, config: LoopedConfig, body: LoopedBody | None = None):
        super().__init__(config)
        body = LoopedBody(config.to_model_config()) if body is None else body
        # As a child the body would bring every weight a second time, under another name.
        self.__dict__["_body"] = body
        for name, part in self._parts.items():
            setattr(self, name, getattr(body, part))
        for tensor in (*body.parameters(), *body.buffers()):
            # A marked meta tensor cannot be registered again under `init_empty_weights`, by which vLLM builds models.
            if not tensor.is_meta:
                cast(Any, tensor)._is_hf_initialized = True
        self.gradient_checkpointing = False
        self.find_shifts()
        self.build_slots(None if config.loops is None else Fixed(config.loops))
        self.post_init()

    def find_shifts(self) -> None:
        """See whether a token reads the state of the one before, which padding on the left would change.

        It is asked when the model is built and, since there may be no values then, when its weights are loaded.
        """
        self.shifted = any(mixes_tokens(cast(Loop, loop)) for loop in self.body.loops)

    def build_slots(self, depth: Depth | None) -> int | None:
        """Make a slot for every layer that is run at this depth, and return how many loops it runs at most."""
        loops = None
        if depth is not None:
            if not self.body.loops:
                raise ValueError(f"layout {self.config.layout!r} has no looped segment, so {depth} cannot be set")
            if depth.leaves and self.shifted:
                raise ValueError(f"a token of this model reads the state of the one before, so that {depth} is refused")
            batch = len(depth.counts) if isinstance(depth, PerSequence | PerToken) else 1
            counts = {depth.count_steps(cast(Loop, loop), batch) for loop in self.body.loops}
            # An exit leaves each loop its own number, where they have several.
            loops = counts.pop() if len(counts) == 1 else None
        config = self.body.config if loops is None else self.body.config.with_loops(loops)
        layout = Layout.of(config)
        readings = layout.readings(depth is not None and depth.through_coda)
        layers = [*layout.layers, *readings]
        self.config.through_coda = bool(readings)
        self.slots = nn.ModuleList(AttentionSlot(self.config, i, layer.attention) for i, layer in enumerate(layers))
        self._depth, self._loops = depth, loops
        return loops

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "*B T"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T d"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool = False,
        **kwargs: Any,
    ) -> LoopedModelOutput:
        """The normed output of the coda. `kwargs` reach the attention of every layer.

        Without a gradient, the auxiliary loss comes with `output_router_logits`, as transformers calls it.
        """
        self._check_call(attention_mask)
        # Continuous batching brings its own cache.
        use_cache = self._resolve_cache(use_cache, kwargs.get("cache") if past_key_values is None else past_key_values)
        h = self._embed(input_ids, inputs_embeds)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        masks = self._masks(h, attention_mask, position_ids, past_key_values, bare=not output_attentions)
        if position_ids is None:
            position_ids = make_positions(h, attention_mask, past_key_values)
        self._check_length(position_ids)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions:
            # Attention that cannot give its weights gives None, with the warning of transformers.
            kwargs["output_attentions"] = True
        states: list[Tensor] = [h]
        weights: list[Tensor] = []
        attend = [
            functools.partial(
                slot,
                attention_mask=masks[slot.kind.name],
                # Flash attention sees packed sequences by their positions.
                position_ids=position_ids,
                past_key_values=past_key_values,
                weights=weights if output_attentions else None,
                **kwargs,
            )
            for slot in cast("list[AttentionSlot]", self.slots)
        ]
        observe = states.append if output_hidden_states else None
        told = output_router_logits or torch.is_grad_enabled()
        packed = past_key_values is None and kwargs.get("cache") is not None
        depth = depth_of_call(self._depth, h.shape[1], past_key_values, packed=packed)
        h, stats, depths, _ = self.body.hidden(
            h, positions=position_ids, attend=attend, depth=depth, stats=told, observe=observe
        )
        return LoopedModelOutput(
            last_hidden_state=cast(Any, h),
            past_key_values=past_key_values if use_cache else None,
            # As everywhere in transformers, the last state is the normed one.
            hidden_states=cast(Any, (*states[:-1], h)) if output_hidden_states else None,
            attentions=cast(Any, tuple(weights)) if output_attentions else None,
            aux_loss=auxiliary_loss(stats),
            depth=depths if depth is not None and depth.leaves else None,
        )

    def _masks(
        self, h: Tensor, attention_mask: Any, position_ids: Tensor | None, cache: Cache | None, *, bare: bool
    ) -> Mapping[str, Any]:
        """The mask of each kind of layer; `bare` allows none, which attention that tells its weights does not take."""
        if bare and needs_no_mask(self.config, attention_mask, position_ids, cache):
            return {kind.name: Unmasked(window_of(kind, self.config)) for kind in self.kinds}
        return make_masks(self.config, self.kinds, h, attention_mask, position_ids, cache)

    @property
    def kinds(self) -> set[AttentionKind]:
        """The kinds of attention there are."""
        return {cast(AttentionKind, slot.kind) for slot in self.slots}

    def _check_call(self, attention_mask: Any) -> None:
        if self.config.loops != self._loops:
            raise ValueError(f"config.loops was changed to {self.config.loops}; call set_loops({self.config.loops})")
        if self.shifted and self.config._attn_implementation == "vllm":
            raise ValueError(
                "vLLM lays sequences behind each other, and with token_shift=True one would read the end of another; "
                "generate with transformers"
            )
        if self.shifted and isinstance(attention_mask, Tensor) and not attention_mask[..., 0].all():
            raise ValueError(
                "with token_shift=True the first token would read its padding; pad on the right, or not at all"
            )

    def _embed(
        self, input_ids: Int[Tensor, "B T"] | None, inputs_embeds: Float[Tensor, "B T d"] | None
    ) -> Float[Tensor, "B T d"]:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds, and not both")
        if inputs_embeds is not None:
            return inputs_embeds
        assert input_ids is not None
        self.body.check_vocabulary(input_ids)
        return self.body.embedding(input_ids)

    def _check_length(self, position_ids: Tensor) -> None:
        # On a GPU the check would wait for the device.
        if position_ids.device.type == "cpu" and not torch.compiler.is_compiling() and position_ids.numel():
            length, limit = int(position_ids.max()) + 1, self.config.max_position_embeddings
            if length > limit:
                raise ValueError(f"the sequence has {length} tokens, but max_position_embeddings is {limit}")

    def _resolve_cache(self, use_cache: bool | None, past_key_values: Any) -> bool:
        """Whether to cache; refused where it is asked for and would be wrong."""
        recomputed = self.body.checkpointing and torch.is_grad_enabled()
        asked = past_key_values is not None or bool(use_cache)
        if self.shifted and asked:
            raise ValueError(
                "a transition with token_shift=True reads the state of the token before, which no KV cache holds; "
                "pass use_cache=False"
            )
        if self._narrow and asked:
            raise ValueError("the caches of transformers do not hold a window of 1 token; pass use_cache=False")
        if recomputed and past_key_values is not None:
            raise ValueError(
                "gradient checkpointing runs layers twice, which would enter them twice in past_key_values; "
                "call gradient_checkpointing_disable() or leave past_key_values out"
            )
        default = self.config.use_cache and not self.training
        return (default if use_cache is None else use_cache) and self.caches and not recomputed

    @property
    def caches(self) -> bool:
        """Whether decoding through a KV cache is possible."""
        return not (self.shifted or self._narrow)

    @property
    def _narrow(self) -> bool:
        return self.config.sliding_window == 1 and any(slot.sliding_window for slot in self.slots)


class LoopedForCausalLM(LoopedPreTrainedModel, GenerationMixin):
    """The body and its head: generation, Trainer, PEFT, lm-eval."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _parts = {"lm_head": "head"}  # noqa: RUF012

    def __init__(self, config: LoopedConfig, looped: LoopedLM | None = None):
        super().__init__(config)
        looped = LoopedLM(config.to_model_config()) if looped is None else looped
        self.model = LoopedModel(config, looped)
        self.lm_head = looped.head
        self.post_init()

    @property
    def looped(self) -> LoopedLM:
        """The same weights as a model of looptim."""
        return cast(LoopedLM, self.body)

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
    ) -> LoopedCausalLMOutput:
        """Logits in fp32; with `labels`, the next-token loss, in training plus the weighted auxiliary loss."""
        seen = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **({"output_router_logits": True} if labels is not None else {}) | kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(seen.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if seen.aux_loss is not None and self.training:
                loss = loss + self.config.router_aux_loss_coef * seen.aux_loss
        return LoopedCausalLMOutput(
            loss=loss,
            aux_loss=None if labels is None else seen.aux_loss,
            logits=logits,
            past_key_values=seen.past_key_values,
            hidden_states=seen.hidden_states,
            attentions=seen.attentions,
            depth=seen.depth,
        )

    def generate(self, *args: Any, **options: Any) -> Any:
        """As `generate` of transformers, with the weights laid where a single token is fastest."""
        lay_together(self)
        return cast(Any, super()).generate(*args, **options)

    def create_masks_for_generate(
        self, *, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Cache | None, **others: Any
    ) -> Mapping[str, Any]:
        """The masks of a compiled decode step, which `generate` makes outside of it."""
        positions = others.get("position_ids")
        return make_masks(self.config, self.model.kinds, inputs_embeds, attention_mask, positions, past_key_values)

    def _get_resized_lm_head(self, old_lm_head: Any, *args: Any, **options: Any) -> Any:
        resized = super()._get_resized_lm_head(old_lm_head, *args, **options)
        # transformers makes a plain Linear of it, whose logits would not be in fp32.
        with torch.device("meta"):
            head = Head(resized.in_features, vocab_size=resized.out_features, chunk=old_lm_head.chunk)
        head.weight = cast(nn.Parameter, resized.weight)
        # Without the mark a later post_init would take it for a weight that no checkpoint brought.
        cast(Any, head.weight)._is_hf_initialized = True
        return head
