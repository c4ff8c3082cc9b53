"""Tokenizers: one class around `tokenizers` for BPE trained here, raw bytes, and any tokenizer.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from ..base.files import os_errors_as, write_whole

EOS = "<|endoftext|>"
"""The end-of-document token of tokenizers made here."""

CHAT_TEMPLATE = "chat_template.jinja"
"""The file beside a tokenizer that transformers reads its chat template from."""

_KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "[SEP]")


@final
class Tokenizer:
    """Text to ids and back. `eos` is the id that ends a document; no text ever encodes to it.

    >>> tokenizer = Tokenizer.bytes()
    >>> tokenizer.encode("a=é"), tokenizer.eos, tokenizer.vocab_size
    ([97, 61, 195, 169], 256, 257)
    >>> tokenizer.decode([97, 61, 195, 169, 256])
    'a=é'
    """

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        *,
        eos: str | None = None,
        bos: str | None = None,
        chat_template: str | None = None,
    ):
        model.no_truncation()
        model.no_padding()
        self.eos_token = eos or next((name for name in _KNOWN_EOS if model.token_to_id(name) is not None), EOS)
        self.lacked_end = model.token_to_id(self.eos_token) is None
        """Whether the end-of-document token was added, so no text it tokenized earlier contained one."""
        model.add_special_tokens([AddedToken(self.eos_token, special=True, normalized=False)])
        self._text = model.to_str()
        # A special token that is spelled out in a text is plain text.
        model.encode_special_tokens = True
        self._model = model
        vocabulary = model.get_vocab(with_added_tokens=True)
        self.eos: int = vocabulary[self.eos_token]
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.end = (self.eos,)
        """What follows a document."""
        self.bos_token = bos if bos in vocabulary else self.eos_token
        self.bos: int = vocabulary[self.bos_token]
        # Many tokenizers of transformers put this token before every text; models trained here do not know it.
        self.begins = model.encode("").ids[:1] == [self.bos]
        """Whether the tokenizer itself begins a text with `bos`, as decoders trained elsewhere expect."""
        self.chat_template = chat_template
        self.hash = hashlib.sha256(self._text.encode()).hexdigest()
        self._is_bytes = self.vocab_size == 257 and self._text == _byte_model().to_str()

    @classmethod
    def bytes(cls) -> Tokenizer:
        """Raw bytes: ids 0 to 255 are the bytes of UTF-8 and 256 ends a document."""
        return cls(_byte_model(), eos=EOS)

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
        """Byte-level BPE of at most `vocab_size` tokens; a short text yields fewer."""
        if vocab_size < 257:
            raise ValueError(
                f"vocab_size {vocab_size} is too small for byte-level BPE; 256 bytes and the end of a document take 257"
            )
        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        return cls(model, eos=EOS)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer.json, or the one in a folder; its config names the token that ends a document."""
        path = Path(path).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            model = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(
                f"tokenizer {str(path)!r} cannot be read ({error.strerror}); "
                "give bpe, bytes, the path of a tokenizer.json or hf:NAME"
            ) from error
        except Exception as error:
            # tokenizers raises bare Exceptions.
            raise ValueError(f"{path} is not a tokenizer.json of the tokenizers library ({error})") from error
        return cls(model, **_configured(path.with_name("tokenizer_config.json")))

    @classmethod
    def pretrained(cls, name: str) -> Tokenizer:
        """A tokenizer of the Hugging Face hub."""
        try:
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

            model = tokenizers.Tokenizer.from_pretrained(name)
            known: dict[str, str | None] = {}
            for file in (CHAT_TEMPLATE, "tokenizer_config.json"):
                try:
                    # Files of one repository lie beside each other.
                    known = _configured(Path(hf_hub_download(name, file)).with_name("tokenizer_config.json"))
                except EntryNotFoundError as error:
                    # The repository has no such file, unless we are offline and cannot know.
                    if isinstance(error, LocalEntryNotFoundError):
                        raise
            return cls(model, **known)
        except Exception as error:
            # The hub raises many kinds of errors for the same cause.
            reason = (str(error).strip().splitlines() or ["no answer"])[0].rstrip(".")
            raise ValueError(
                f"tokenizer 'hf:{name}' cannot be loaded: {reason}; check its name and the network"
            ) from error

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any special token."""
        return list(text.encode()) if self._is_bytes else self._model.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str, *, foreign: bool) -> list[int]:
        """The ids of a text to go on from: for a model trained elsewhere with the token that begins one."""
        ids = [self.bos] * (foreign and self.begins) + self.encode(text)
        return ids or [self.eos]

    def encode_many(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]:
        """The ids of many texts, using every core."""
        if self._is_bytes:
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        return [encoding.ids for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    @property
    def special_tokens(self) -> list[str]:
        """The spellings of the special tokens."""
        return [token.content for token in self._model.get_added_tokens_decoder().values() if token.special]

    def encode_written(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The ids of what a chat template has written, its special tokens among them, and where each begins."""
        model = tokenizers.Tokenizer.from_str(self._text)
        encoded = model.encode_batch(texts, add_special_tokens=False)
        return [(np.array(e.ids, np.int64), np.array([start for start, _ in e.offsets], np.int64)) for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens."""
        return self._model.decode([int(id) for id in ids], skip_special_tokens=True)

    def pieces(self, ids: Iterable[int]) -> dict[int, str]:
        """The text of each single token; bytes that are not a whole character are spelled out.

        >>> Tokenizer.bytes().pieces([97, 195, 256])
        {97: 'a', 195: '\\\\xc3', 256: '<|endoftext|>'}
        """
        letters = _byte_letters() if '"ByteLevel"' in json.dumps(json.loads(self._text)["decoder"]) else {}
        return {id: _piece(self._model.id_to_token(id), letters) for id in map(int, ids)}

    def save(self, folder: str | Path, *, max_length: int | None = None) -> None:
        """Write what `transformers.AutoTokenizer.from_pretrained(folder)` and `Tokenizer.load(folder)` need.

        `max_length` is the longest sequence that the model takes.
        """
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.eos_token,
            "clean_up_tokenization_spaces": False,
        }
        if max_length is not None:
            settings["model_max_length"] = max_length
        with os_errors_as(f"the folder {str(folder)!r} cannot be written", "free some space or get write access"):
            write_whole(Path(folder) / "tokenizer.json", self._text)
            write_whole(
                Path(folder) / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            )
            if self.chat_template is not None:
                write_whole(Path(folder) / CHAT_TEMPLATE, self.chat_template)


def _byte_model() -> tokenizers.Tokenizer:
    """Byte-level BPE without merges: every byte is a token whose id is its value."""
    model = tokenizers.Tokenizer(models.BPE(vocab=_byte_letters(), merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return model


def _byte_letters() -> dict[str, int]:
    """The table of GPT-2: printable bytes are themselves, the others follow from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


def _piece(token: str | None, letters: dict[str, int]) -> str:
    if token is None:
        # A model may have more rows in its vocabulary than its tokenizer has tokens.
        return "(no token)"
    if all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token).decode(errors="backslashreplace")
    return token.replace("▁", " ")


def _configured(path: Path) -> dict[str, str | None]:
    """The tokens that end and begin a document, and the chat template, as a tokenizer's folder has them."""
    beside = path.with_name(CHAT_TEMPLATE)
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        named = {key: known.get(f"{key}_token") for key in ("eos", "bos")}
        template = beside.read_text(encoding="utf-8") if beside.is_file() else known.get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a tokenizer_config.json ({error})") from error
    named = {key: token.get("content") if isinstance(token, dict) else token for key, token in named.items()}
    for key, token in named.items():
        if token is not None and not (isinstance(token, str) and token):
            raise ValueError(f"{path}: {key}_token must be a text, got {token!r}; name a token of the tokenizer")
    return named | {"chat_template": template if isinstance(template, str) else None}
