"""Text from a model: one prompt streamed, or many prompts completed in a batch; both by transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from .data import Tokenizer
from .loading import wrap
from .loop import Depth
from .loop.depth import Fixed
from .model import LoopedLM

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel


def generate(
    model: LoopedLM | PreTrainedModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    loops: int | None = None,
    depth: Depth | None = None,
    draft_loops: int | None = None,
    stream: Callable[[str], None] | None = None,
    on_depth: Callable[[int], None] | None = None,
) -> str:
    """The continuation of a prompt by a model of ours or a looped decoder; temperature 0 is greedy.

    `stream` is given the text piece by piece as it comes. The text has at most `max_new_tokens`, which must fit the
    model's maximum length; the default is 200, or what fits. `depth` says how deep each token goes. If tokens may
    leave, `on_depth` gets the number of loops behind each new token. `draft_loops` generates the same text faster: the
    first loops of a shared transition draft some tokens, and the other loops run for all of them at once.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a number of at least 0, got {temperature}; 0 is greedy")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"top_p must lie between 0 and 1, got {top_p}")
    ids = tokenizer.encode_prompt(prompt, foreign=not isinstance(model, LoopedLM))
    room = _room(model, len(ids))
    if max_new_tokens is not None and not 1 <= max_new_tokens <= room:
        raise ValueError(
            f"max_new_tokens must lie between 1 and {room}, got {max_new_tokens}; that is what the model's max_length "
            f"({_longest(model)}) leaves after a prompt of {len(ids)} tokens"
        )
    sampling = {
        "do_sample": True,
        "temperature": temperature,
        "top_k": top_k or 0,
        "top_p": 1.0 if top_p is None else top_p,
    }
    streamer = _Streamer(tokenizer, stream) if stream else None
    device = next(model.parameters()).device
    with _wrapped(model, loops, depth) as wrapped, _seeded(seed), _told(wrapped, on_depth):
        out = wrapped.generate(
            torch.tensor([ids], device=device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
            max_new_tokens=min(200, room) if max_new_tokens is None else max_new_tokens,
            use_cache=_caches(wrapped),
            streamer=streamer,
            eos_token_id=_ends(wrapped, tokenizer),
            pad_token_id=tokenizer.eos,
            **_drafting(wrapped, draft_loops, depth, streamer),
            # Logits divided by a smaller temperature would overflow.
            **(sampling if temperature > 1e-6 else {"do_sample": False}),
        )
    # The answer is decoded together with its prompt; alone, some tokenizers drop the space before its first word.
    return tokenizer.decode(out[0].tolist())[len(tokenizer.decode(ids)) :]


def complete(
    model: LoopedLM | PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    stop: str = "\n",
    batch_size: int = 64,
    loops: int | None = None,
    depth: Depth | None = None,
) -> list[str]:
    """Greedy continuations of many prompts, up to `stop`, left-padded in batches through the KV cache."""
    with _wrapped(model, loops, depth) as wrapped:
        # A token shift does not allow padding on the left, so its prompts run one by one.
        shifted = isinstance(model, LoopedLM) and wrapped.model.shifted
        return _complete(wrapped, tokenizer, prompts, max_new_tokens, stop, 1 if shifted else batch_size)


def _complete(
    wrapped: Any, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int, stop: str, batch_size: int
) -> list[str]:
    # Only a stop of one token can end generation; the last token of a longer one may appear without the others.
    last = tokenizer.encode(stop)
    ends = {*_ends(wrapped, tokenizer), *(last if len(last) == 1 else [])}
    foreign = not hasattr(wrapped, "looped")
    answers: list[str] = []
    for first in range(0, len(prompts), batch_size):
        rows = [tokenizer.encode_prompt(prompt, foreign=foreign) for prompt in prompts[first : first + batch_size]]
        length = max(map(len, rows))
        padded = [[tokenizer.eos] * (length - len(row)) + row for row in rows]
        tokens = torch.tensor(padded, device=wrapped.device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=tokens.device)
        out = wrapped.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=min(max_new_tokens, _room(wrapped, length)),
            use_cache=_caches(wrapped),
            do_sample=False,
            eos_token_id=sorted(ends),
            pad_token_id=tokenizer.eos,
        )
        answers += [tokenizer.decode(row.tolist()).split(stop)[0] for row in out[:, length:]]
    return answers


def _longest(model: LoopedLM | PreTrainedModel) -> int:
    """How many tokens a model takes."""
    return model.config.max_length if isinstance(model, LoopedLM) else model.config.max_position_embeddings


def _room(model: LoopedLM | PreTrainedModel, length: int) -> int:
    """How many tokens may follow a prompt."""
    room = _longest(model) - length
    if room < 1:
        raise ValueError(f"the prompt has {length} tokens, but max_length is {_longest(model)}; shorten it")
    return room


def _caches(wrapped: Any) -> bool:
    """Whether decoding through a KV cache is possible, which a transition of ours may rule out."""
    return wrapped.model.caches if hasattr(wrapped, "looped") else True


def _ends(wrapped: Any, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a text; a foreign decoder may have several."""
    own = None if hasattr(wrapped, "looped") else wrapped.generation_config.eos_token_id
    return sorted({tokenizer.eos, *([own] if isinstance(own, int) else own or [])})


def _drafting(wrapped: Any, draft_loops: int | None, depth: Depth | None, streamer: Any) -> dict[str, Any]:
    """What transformers is told where the first loops are to draft."""
    if draft_loops is None:
        return {}
    if depth is not None:
        raise ValueError(f"draft_loops ({draft_loops}) and depth ({depth}) do not go together; leave one out")
    if not hasattr(wrapped, "looped"):
        raise ValueError("only a model of looptim's own is drafted by its first loops; leave draft_loops out")
    if not wrapped.model.caches:
        raise ValueError("a model that decodes without a KV cache cannot be drafted by its first loops")
    # The module below is one of those that need transformers.
    from .hf.speculative import speculate

    # To a method of one's own transformers does not hand the streamer on.
    return {"custom_generate": partial(speculate, draft_loops=draft_loops, streamer=streamer)}


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Draw from `seed`, and restore the global generators afterwards for a training that may be running."""
    if seed is None:
        yield
        return
    # torch.manual_seed seeds every device, so each generator is forked.
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _wrapped(model: LoopedLM | PreTrainedModel, loops: int | None, depth: Depth | None) -> Iterator[Any]:
    """The model as transformers sees it, in eval mode; its mode and a decoder's depth are restored afterwards."""
    if loops is not None and depth is not None:
        raise ValueError(f"loops ({loops}) and depth ({depth}) both say how deep to go; give only one")
    training = model.training
    try:
        # Bookkeeping for gradients would take a seventh of the time per token.
        with torch.inference_mode():
            if not isinstance(model, LoopedLM):
                with at_depth(model.eval(), loops, depth):
                    yield model
                return
            if model.config.pairs:
                raise ValueError("this model reads two tokens at a time and writes one; it cannot continue a text")
            wrapped = wrap(model.eval(), loops=loops)
            if depth is not None:
                wrapped.set_depth(depth)
            yield wrapped
    finally:
        model.train(training)


@contextmanager
def at_depth(decoder: Any, loops: int | None, depth: Depth | None) -> Iterator[None]:
    """A decoder of transformers that runs another number of loops, or lets tokens leave."""
    depth = depth if loops is None else Fixed(loops)
    if depth is None:
        yield
        return
    if not hasattr(decoder, "unrolled"):
        raise ValueError(f"{type(decoder).__name__} has no loops; leave loops and depth out")
    before = decoder.unrolled.depth or (None if decoder.config.loops is None else Fixed(decoder.config.loops))
    decoder.set_depth(depth)
    try:
        yield
    finally:
        decoder.set_depth(before)


@contextmanager
def _told(wrapped: Any, on_depth: Callable[[int], None] | None) -> Iterator[None]:
    """While text is generated, call `on_depth` with the depth of the last token of every forward pass."""
    if on_depth is None:
        yield
        return

    def tell(module: Any, given: Any, out: Any) -> None:
        depth = getattr(out, "depth", None)
        if depth:
            on_depth(sum(int(each[0, -1]) for each in depth))

    hook = wrapped.register_forward_hook(tell)
    try:
        yield
    finally:
        hook.remove()


@final
class _Streamer:
    """The streamer that transformers passes tokens to; it emits text as soon as characters are complete."""

    def __init__(self, tokenizer: Tokenizer, emit: Callable[[str], None]):
        self.tokenizer = tokenizer
        self.emit = emit
        self.ids: list[int] = []
        self.sent = ""

    def put(self, value: Tensor) -> None:
        # The prompt comes first and is not streamed.
        prompt = not self.ids
        self.ids += value.flatten().tolist()
        text = self.tokenizer.decode(self.ids)
        if prompt:
            self.sent = text
        elif not text.endswith("\ufffd"):
            self.emit(text[len(self.sent) :])
            self.sent = text

    def end(self) -> None:
        self.emit(self.tokenizer.decode(self.ids)[len(self.sent) :])
