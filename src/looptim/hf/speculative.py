"""Self-speculative decoding: the first loops draft some tokens, the other loops say how many of them stand.

The draft of a token is `head(coda(readout(Y_r)))` after the first r loops. Then the states `Y_r` of all drafted tokens
go on through the other loops together, and the coda reads them at full depth. Prelude and first loops are never
computed twice, nor are their keys and values.

A token is `choose(logits, place)`, the same function of the logits for draft and model, since what is random in it
belongs to the place. The text is therefore what the model alone would have written, in sampling too and with the same
seed, whatever the draft proposes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

from ..loop import Loop
from ..model import Layout, LoopedLM
from ..model.stages import Begun, Stages, find_loop, join
from .model import LoopedForCausalLM
from .slots import AttentionSlot, Unmasked

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LONGEST = 8
"""The most tokens that go on through the other loops together."""


class Tally(NamedTuple):
    """What speculation was worth."""

    tokens: int
    """New tokens."""
    rounds: int
    """How often the loops after the draft's were run."""


def speculate(
    model: LoopedForCausalLM,
    input_ids: Int[Tensor, "1 T"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_loops: int,
    streamer: Any = None,
    on_end: Any = None,
    **ignored: Any,
) -> Int[Tensor, "1 T"]:
    """What `generate(custom_generate=functools.partial(speculate, draft_loops=2))` of transformers calls."""
    sampler = Sampler(logits_processor, sampled=bool(generation_config.do_sample))
    text = Drafter(model, draft_loops)
    tokens, rounds = input_ids, 0
    limit = stopping_criteria.max_length or model.config.max_position_embeddings
    new = text.read(tokens, sampler)
    while True:
        for token in new:
            tokens = torch.cat([tokens, token.view(1, 1)], dim=1)
            if streamer is not None:
                streamer.put(token.view(1).cpu())
            # The criteria of transformers look at scores where they want them, and none of ours do.
            if stopping_criteria(tokens, cast(Any, None)).all():
                break
        else:
            new, rounds = text.write(tokens, sampler, limit - tokens.shape[1]), rounds + 1
            continue
        break
    if streamer is not None:
        streamer.end()
    if on_end is not None:
        on_end(Tally(tokens.shape[1] - input_ids.shape[1], rounds))
    return tokens


@final
class Sampler:
    """`choose(logits, place)`: the token at a place, greedy or drawn as `torch.multinomial` draws.

    A token is drawn as `argmax p / E` with exponential noise E. The noise of a place is drawn once, in the order of
    places: a draft and the model that look at the same place see the same noise.
    """

    def __init__(self, processor: LogitsProcessorList, *, sampled: bool):
        self.processor, self.sampled = processor, sampled
        self.noise: list[Tensor] = []
        self.first = 0

    def choose(self, before: Int[Tensor, "1 T"], logits: Float[Tensor, "1 vocab"]) -> Int[Tensor, ""]:
        """The token after `before`."""
        scores = self.processor(cast(Any, before), cast(Any, logits.clone()))
        if not self.sampled:
            return scores.argmax()
        p = scores.softmax(-1)
        self.first = self.first or before.shape[1]
        while len(self.noise) <= before.shape[1] - self.first:
            self.noise.append(torch.empty_like(p).exponential_(1))
        return (p / self.noise[before.shape[1] - self.first]).argmax()


@final
class Drafter:
    """A model, its first loops as the draft of it, and the cache of what both have read."""

    def __init__(self, model: LoopedForCausalLM, draft_loops: int):
        self.model, self.looped, self.draft_loops = model, model.looped, draft_loops
        config = self.looped.config
        self.layout = Layout.of(config if model.config.loops is None else config.with_loops(model.config.loops))
        check_draft(self.looped, self.layout, draft_loops)
        self.length = 4
        # Windows are cached whole, since a draft that does not stand is taken back.
        self.cache = DynamicCache()
        coda = sum(
            len(step) for segment in self.layout.segments[find_loop(self.layout) + 1 :] for step in segment.steps
        )
        self.coda = range(len(self.layout.layers) - coda, len(self.layout.layers))

    def read(self, tokens: Int[Tensor, "1 T"], sampler: Sampler) -> list[Tensor]:
        """Read a prompt; the token after it."""
        stages, h = self._stages(tokens, 0)
        hidden = stages.finish(stages.go_on(stages.begin(h, self.draft_loops)))
        return [sampler.choose(tokens, self.looped.head(hidden[:, -1]))]

    def write(self, tokens: Int[Tensor, "1 T"], sampler: Sampler, most: int) -> list[Tensor]:
        """The next tokens, at least one and at most so many; of `tokens` all but the last were read."""
        first = tokens.shape[1] - 1
        drafted, begun = self._draft(tokens, sampler, min(self.length, most))
        self._keep(first, self.coda)
        stages, _ = self._stages(drafted[:, first:], first)
        logits = self.looped.head(stages.finish(stages.go_on(begun)))
        new: list[Tensor] = []
        for place in range(first, drafted.shape[1]):
            new.append(sampler.choose(drafted[:, : place + 1], logits[:, place - first]))
            if place + 1 < drafted.shape[1] and new[-1] != drafted[0, place + 1]:
                break
        self._keep(first + len(new), range(self.coda.stop))
        # The next round is longer where all stood, and as long as what stood where not.
        all_stood = len(new) == drafted.shape[1] - first
        self.length = min(self.length + 2, LONGEST) if all_stood else max(len(new), 2)
        return new

    def _draft(self, tokens: Tensor, sampler: Sampler, most: int) -> tuple[Tensor, Begun]:
        """The tokens with those that are drafted behind them, and the unread ones part of the way through the loop."""
        begun: list[Begun] = []
        while True:
            stages, h = self._stages(tokens[:, -1:], tokens.shape[1] - 1)
            begun.append(stages.begin(h, self.draft_loops))
            # The model chooses after the last one itself.
            if len(begun) == most:
                return tokens, join(begun)
            logits = self.looped.head(stages.finish(begun[-1])[:, -1])
            tokens = torch.cat([tokens, sampler.choose(tokens, logits).view(1, 1)], dim=1)

    def _stages(self, tokens: Int[Tensor, "1 T"], first: int) -> tuple[Stages, Float[Tensor, "1 T d"]]:
        """The stages of tokens that stand from place `first` on, and their embeddings."""
        h = self.looped.embedding(tokens)
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device).unsqueeze(0)
        slots = self.model.model.slots
        attend = [
            functools.partial(
                slot, attention_mask=Unmasked(cast(AttentionSlot, slot).kind.window), past_key_values=self.cache
            )
            for slot in slots
        ]
        return Stages(self.looped, self.layout, h, positions, attend), h

    def _keep(self, number: int, layers: range) -> None:
        """Keep the first tokens only in some layers of the cache."""
        for index in layers:
            layer = cast(DynamicLayer, self.cache.layers[index])
            surplus = layer.get_seq_length() - number
            if surplus > 0:
                layer.crop(-surplus)


def check_draft(model: LoopedLM, layout: Layout, draft_loops: int) -> None:
    """A ValueError where a model cannot be drafted by its first loops."""
    loops = len(layout.segments[find_loop(layout)].steps)
    loop = cast(Loop, model.loops[0])
    if not loop.shared:
        raise ValueError(
            f"{loop.name} has loop-specific parameters, so that its first loops are no model of their own; draft with "
            "a transition shared over loops"
        )
    if not 1 <= draft_loops < loops:
        raise ValueError(
            f"draft_loops must be at least 1 and less than the {loops} loops that are run, got {draft_loops}"
        )
