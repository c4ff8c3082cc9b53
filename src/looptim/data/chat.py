"""Conversations as training data: a chat template writes them out, and what the assistant says has a loss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .shards import Shard
from .tokenizer import Tokenizer

PLAIN = """{% for message in messages %}
{{ message['role'] + ': ' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}
"""
"""The template `plain`: roles are words, and the end token ends what the assistant says."""

Messages = Sequence[Mapping[str, Any]]


def chat_text(value: Any, *, where: str) -> str:
    """A conversation as one text, from the value of a field; what is no conversation is a ValueError."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{where} holds no list of messages; each is an object with a role and a content")
    for message in value:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: a message needs a role and a content, both text, got {_short(message)}")
    if not any(message["role"] == "assistant" for message in value):
        raise ValueError(f"{where}: no message has the role assistant, so there is nothing to learn; leave it out")
    return json.dumps(value, ensure_ascii=False)


def contents(text: str) -> str:
    """What is said in a conversation, for a tokenizer to be trained on."""
    return "\n".join(message["content"] for message in json.loads(text))


def find_template(given: str, tokenizer: Tokenizer) -> str:
    """The chat template that `data.template` names."""
    if given == "plain":
        return PLAIN
    if given == "tokenizer":
        if tokenizer.chat_template is None:
            raise ValueError("data.template is tokenizer, but that has no chat template; give plain, or a path of one")
        return tokenizer.chat_template
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"data.template {given!r} cannot be read ({reason}); give tokenizer, plain or a path"
        ) from None


class _Generation(Extension):
    """`{% generation %}`, by which some templates mark what the assistant says; here it is looked up otherwise."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@final
class Chats:
    """Encodes conversations where a `Tokenizer` encodes texts. The vocabulary is four times as large.

    A token is stored as `id + size * mark`, where the mark 1 says that it has a loss and 2 that it ends its
    conversation; `ChatShard` takes the two apart.

    >>> chats = Chats(Tokenizer.bytes(), PLAIN)
    >>> chats.write([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}])
    'user: Hi\\nassistant: Yes?<|endoftext|>\\n'
    >>> ids = chats.encode_many([chat_text([{"role": "assistant", "content": "?"}], where="")])[0]
    >>> (ids % 257).tolist()[-3:]
    [63, 256, 10]
    """

    end: Sequence[int] = ()
    """What follows a conversation: nothing, because its last token has a mark."""

    def __init__(self, tokenizer: Tokenizer, template: str):
        self.tokenizer = tokenizer
        self.vocab_size = 4 * tokenizer.vocab_size
        self.hash = hashlib.sha256(f"chats 1\n{tokenizer.hash}\n{template}".encode()).hexdigest()
        # As transformers does it, with neither clock nor files.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot be read ({error}); repair it") from None

    def write(self, messages: Messages, *, asks: bool = False) -> str:
        """A conversation as text; if it `asks`, up to where the assistant begins to answer."""
        names = {"bos_token": self.tokenizer.bos_token, "eos_token": self.tokenizer.eos_token}
        try:
            return self._template.render(messages=messages, add_generation_prompt=asks, **names)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot write {_short(messages)} ({error}); repair either") from None

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The stored tokens of conversations; none for an empty text."""
        known = [json.loads(text) if text else [] for text in texts]
        for message in (message for messages in known for message in messages):
            self._check_content(message["content"])
        written = [self.write(messages) if messages else "" for messages in known]
        size, encoded = self.tokenizer.vocab_size, []
        for messages, text, (ids, starts) in zip(known, written, self.tokenizer.encode_written(written), strict=True):
            marks = np.zeros(len(ids), dtype=np.int64)
            for begin, end in self._answers(messages, text):
                marks[(starts >= begin) & (starts < end)] = 1
            marks[-1:] += 2
            encoded.append(ids + size * marks)
        return encoded

    def _answers(self, messages: Messages, whole: str) -> list[tuple[int, int]]:
        """Where in the text the assistant speaks, with what the template puts behind it."""
        spans = []
        for count, message in enumerate(messages):
            if message["role"] == "assistant":
                asked, answered = self.write(messages[:count], asks=True), self.write(messages[: count + 1])
                if not (answered.startswith(asked) and whole.startswith(answered)):
                    raise ValueError(
                        f"the chat template writes {_short(messages)} in another way once the conversation goes on, so "
                        "that an answer has no place of its own; give a template that only appends"
                    )
                spans.append((len(asked), len(answered)))
        return spans

    def _check_content(self, content: str) -> None:
        spelled = next((name for name in self.tokenizer.special_tokens if name in content), None)
        if spelled is not None:
            raise ValueError(
                f"a message spells the special token {spelled!r}, which only the template may write: "
                f"{_short(content)}; leave it out"
            )


@final
class ChatShard:
    """A shard of conversations, its tokens and marks taken apart."""

    def __init__(self, shard: Shard, vocab_size: int):
        self.shard, self.vocab_size = shard, vocab_size

    def __len__(self) -> int:
        return len(self.shard)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`."""
        return self.shard.read(start, stop) % self.vocab_size

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Whether each of these tokens ends a conversation."""
        return self.shard.read(start, stop) // self.vocab_size >= 2

    def counted(self, start: int, stop: int) -> np.ndarray:
        """Whether each of these tokens has a loss as a target."""
        return self.shard.read(start, stop) // self.vocab_size % 2 == 1


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
