"""From a config to a dataset: find the corpus, get its tokenizer, pack it once, open it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from ..base.console import Progress
from ..base.files import whole_folder, write_whole
from ..config import DataConfig
from .cache import cache_folder, digest, writing
from .corpus import SPLITS, Corpus, Split, find_corpus
from .dataset import Dataset, PackedDataset
from .deref import DerefDataset
from .shards import ShardWriter
from .sources import find_source, find_valid_source
from .synthetic import SyntheticDataset
from .tasks import find_task
from .tokenizer import Tokenizer

_SAMPLE = 32 << 20
"""Characters a tokenizer is trained on at most."""
_TOGETHER = 4 << 20
"""Characters tokenized at a time."""


def open_data(config: DataConfig, *, vocab_size: int, seq_len: int, progress: bool = True) -> Dataset:
    """The dataset a config names: tokenized and packed on first use, memory-mapped from the cache afterwards."""
    if seq_len < 1:
        raise ValueError(f"seq_len {seq_len} must be at least 1")
    if config.source.startswith("synthetic:"):
        if config.valid_source is not None:
            raise ValueError(
                f"data.valid_source {config.valid_source!r} cannot go with {config.source!r}; leave it out"
            )
        if config.source == "synthetic:deref":
            _check_size(Tokenizer.bytes(), config, vocab_size)
            return DerefDataset(config.options, seq_len=seq_len)
        task = find_task(config.source.removeprefix("synthetic:"))
        # A task has no text to train a BPE on, and its digits must stay apart.
        tokenizer = Tokenizer.bytes() if config.tokenizer == "bpe" else _given_tokenizer(config)
        _check_size(tokenizer, config, vocab_size)
        return SyntheticDataset(
            task, config.options, seq_len=seq_len, tokenizer=tokenizer, mask_boundaries=config.mask_boundaries
        )
    cache = cache_folder(config.cache)
    given = None if config.tokenizer == "bpe" else _given_tokenizer(config)
    if given is not None:
        _check_size(given, config, vocab_size)
    corpus = find_corpus(config, cache=cache, progress=progress)
    tokenizer = given or _trained_tokenizer(corpus, vocab_size, cache, progress)
    folder = cache / "packed" / digest([corpus.key, tokenizer.hash])
    if not folder.is_dir():
        with writing(cache), whole_folder(folder) as aside:
            _pack(corpus, tokenizer, aside, progress)
            _check_unchanged(corpus, config)
    return PackedDataset(
        folder,
        seq_len=seq_len,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(folder, config),
        mask_boundaries=config.mask_boundaries,
    )


def _given_tokenizer(config: DataConfig) -> Tokenizer:
    if config.tokenizer == "bytes":
        return Tokenizer.bytes()
    if config.tokenizer.startswith("hf:"):
        return Tokenizer.pretrained(config.tokenizer.removeprefix("hf:"))
    return Tokenizer.load(config.tokenizer)


def _check_size(tokenizer: Tokenizer, config: DataConfig, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        added = " (one of them the end of a document, which it lacks and gets)" if tokenizer.lacked_end else ""
        raise ValueError(
            f"tokenizer {config.tokenizer!r} has {tokenizer.vocab_size} tokens{added} but "
            f"model.vocab_size is {vocab_size}; "
            f"raise it to at least {tokenizer.vocab_size}"
        )


def _trained_tokenizer(corpus: Corpus, vocab_size: int, cache: Path, progress: bool) -> Tokenizer:
    path = cache / "tokenizers" / digest([corpus.key, vocab_size, _SAMPLE]) / "tokenizer.json"
    if not path.parent.is_dir():
        total = corpus.characters and min(_SAMPLE, corpus.characters)
        with Progress(f"training a tokenizer on {corpus.source.name}", total, show=progress) as shown:

            def texts():
                for text in corpus.sample(_SAMPLE):
                    shown.advance(len(text))
                    yield text

            tokenizer = Tokenizer.train(texts(), vocab_size=vocab_size)
        with writing(cache), whole_folder(path.parent) as aside:
            tokenizer.save(aside)
    try:
        return Tokenizer.load(path)
    except ValueError as error:
        raise ValueError(f"the cached tokenizer {path} is damaged; delete its folder and it is made anew") from error


def _pack(corpus: Corpus, tokenizer: Tokenizer, folder: Path, progress: bool) -> None:
    """Both splits of a corpus as shards, with what is to be known of them in meta.json."""
    content, held_out, valid_bytes = hashlib.sha256(), hashlib.sha256(), 0
    with contextlib.ExitStack() as stack:
        title = f"tokenizing {corpus.source.name}"
        shown = stack.enter_context(Progress(title, corpus.characters, show=progress))
        writers: dict[Split, ShardWriter] = {}
        for split in SPLITS:
            writers[split] = ShardWriter(folder / f"{split}.bin", vocab_size=tokenizer.vocab_size)
            stack.callback(writers[split].abandon)
        waiting: list[tuple[Split, str, bool]] = []
        size, last = 0, None
        for document, split, pieces in corpus.parts():
            if document is not last:
                content.update(document.digest)
                last = document
            started = False
            for piece in pieces:
                started = True
                if split == "valid":
                    held_out.update(text := piece.encode())
                    valid_bytes += len(text)
                waiting.append((split, piece, False))
                size += len(piece)
                if size >= _TOGETHER:
                    _flush(waiting, writers, tokenizer)
                    shown.advance(size)
                    size = 0
            if started:
                waiting.append((split, "", True))
        _flush(waiting, writers, tokenizer)
        shown.advance(size)
        for writer in writers.values():
            writer.close()
    _check_packed(corpus, writers)
    meta: dict[str, Any] = {"split_by": corpus.by, "content": content.hexdigest(), "tokenizer": tokenizer.hash}
    for split, writer in writers.items():
        meta |= {f"{split}_tokens": writer.tokens, f"{split}_documents": writer.documents}
    meta |= {"valid_bytes": valid_bytes, "valid_hash": held_out.hexdigest()}
    write_whole(folder / "meta.json", json.dumps(meta, indent=2) + "\n")


def _flush(waiting: list[tuple[Split, str, bool]], writers: dict[Split, ShardWriter], tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_many([text for _, text, _ in waiting])
    for (split, _, end), tokens in zip(waiting, encoded, strict=True):
        writers[split].add([tokenizer.eos] if end else tokens, end=end)
    waiting.clear()


def _check_packed(corpus: Corpus, writers: dict[Split, ShardWriter]) -> None:
    """What only a stream can still get wrong: files have been read before."""
    if not writers["train"].tokens and not writers["valid"].tokens:
        raise ValueError(f"data source {corpus.source.name!r} holds no text; check data.split and data.field")
    train, valid = writers["train"].documents, writers["valid"].documents
    held_out = corpus.characters is None and corpus.fraction > 0
    if held_out and not (train and valid):
        raise ValueError(
            f"the {train + valid} documents of {corpus.source.name!r} leave a split empty at data.valid_fraction "
            f"{corpus.fraction}; change it, or set data.valid_source or options.valid_split"
        )


def _check_unchanged(corpus: Corpus, config: DataConfig) -> None:
    """The cache must not keep a text under the name of another."""
    for before, after in ((corpus.source, find_source), (corpus.valid_source, find_valid_source)):
        if before is not None and before.scannable:
            now = after(config)
            if now is None or now.signature != before.signature:
                raise ValueError(
                    f"the files of {before.name!r} changed while they were read; run again when they are still"
                )


def _fingerprint(folder: Path, config: DataConfig) -> dict[str, Any]:
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder / 'meta.json'} is missing or damaged; delete the folder {str(folder)!r} and it is made anew"
        ) from error
    return {"source": config.source, **meta}
