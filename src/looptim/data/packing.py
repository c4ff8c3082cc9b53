"""From a config to a dataset: find the corpus, get its tokenizer, pack it once, open it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..base.console import Progress
from ..base.files import whole_folder
from ..config import DataConfig
from .cache import cache_folder, digest, writing
from .chat import Chats, ChatShard, contents, find_template
from .corpus import SPLITS, Corpus, Split, find_corpus
from .dataset import Dataset, PackedDataset, Stream
from .graded import GRADED, GradedDataset
from .mixture import MixedDataset, check_mixture
from .pack import Encoder, pack, pack_together
from .shards import Shard
from .sources import find_source, find_valid_source
from .synthetic import SyntheticDataset
from .tasks import find_task
from .together import ALONE, Crew, shared_folder
from .tokenizer import Tokenizer
from .tokens import TokenFile, TokenStream, check_vocabulary, find_tokens, scan_tokens

_SAMPLE = 32 << 20
"""Characters to train a tokenizer on, at most."""


def open_data(
    config: DataConfig, *, vocab_size: int, seq_len: int, progress: bool = True, crew: Crew = ALONE
) -> Dataset:
    """The dataset that a config names, tokenized and packed on first use and memory-mapped from the cache later.

    With a `crew` of processes, every one of them must call this, and each reads and tokenizes its part.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len {seq_len} must be at least 1")
    if config.template is not None and (config.source == "stdlib" or config.source.startswith("synthetic:")):
        raise ValueError(f"data.template is for conversations, and {config.source!r} has none; leave it out")
    if config.source == "mixture" or config.mixture:
        check_mixture(config)
        return _open_mixture(config, vocab_size=vocab_size, seq_len=seq_len, progress=progress, crew=crew)
    if config.source.startswith("synthetic:"):
        return _open_task(config, vocab_size=vocab_size, seq_len=seq_len)
    files = None if config.template else find_tokens(config.source, config)
    cache = cache_folder(config.cache)
    if files is not None:
        return _open_tokens(files, config, vocab_size=vocab_size, seq_len=seq_len, progress=progress, crew=crew)
    given = None if config.tokenizer == "bpe" else _given_tokenizer(config)
    if given is not None:
        _check_size(given, config, vocab_size)
    corpus = find_corpus(config, cache=cache, progress=progress, crew=crew)
    tokenizer = given or _trained_tokenizer(corpus, config, vocab_size, cache, progress=progress, crew=crew)
    encoder = tokenizer if config.template is None else _chats(config.template, tokenizer)
    folder = cache / "packed" / digest([corpus.key, encoder.hash])
    # One process decides for all, since another might already see files that the first has just made.
    if not crew.gather(folder.is_dir())[0]:
        with writing(cache), shared_folder(folder, crew, keep=True) as aside:
            if crew.size == 1:
                pack(corpus, encoder, aside, progress)
            else:
                pack_together(corpus, encoder, aside, crew, progress=progress)
            crew.first_does(lambda: _check_unchanged(corpus, config))
    fingerprint = _fingerprint(folder, config)
    return PackedDataset(
        {split: _open_shard(folder / f"{split}.bin", encoder) for split in SPLITS},
        seq_len=seq_len,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        mask_boundaries=config.mask_boundaries,
    )


def _chats(template: str, tokenizer: Tokenizer) -> Chats:
    """What encodes conversations; the tokenizer keeps the template, so that a run and its export have it."""
    tokenizer.chat_template = find_template(template, tokenizer)
    return Chats(tokenizer, tokenizer.chat_template)


def _open_shard(path: Path, encoder: Encoder) -> Stream:
    shard = Shard(path)
    return ChatShard(shard, encoder.tokenizer.vocab_size) if isinstance(encoder, Chats) else shard


def _open_mixture(config: DataConfig, *, vocab_size: int, seq_len: int, progress: bool, crew: Crew) -> MixedDataset:
    parts = {}
    for name in config.mixture:
        alone = config.model_copy(update={"source": name, "mixture": {}})
        parts[name] = open_data(alone, vocab_size=vocab_size, seq_len=seq_len, progress=progress, crew=crew)
    return MixedDataset(parts, config.mixture)


def task_options(config: DataConfig) -> dict[str, dict[str, Any]]:
    """The knobs of the synthetic task that a source is, by its name, and which problems are held out of it."""
    name = config.source.removeprefix("synthetic:")
    # Tasks of other kinds hold out the same problems always.
    fold = {"valid_fold": config.valid_fold} if config.valid_fold and name in GRADED else {}
    return {name: {**config.options, **fold}}


def _open_task(config: DataConfig, *, vocab_size: int, seq_len: int) -> Dataset:
    if config.valid_source is not None:
        raise ValueError(f"data.valid_source {config.valid_source!r} cannot go with {config.source!r}; leave it out")
    name = config.source.removeprefix("synthetic:")
    if name in GRADED:
        _check_size(Tokenizer.bytes(), config, vocab_size)
        return GradedDataset(
            GRADED[name](config.options, fold=config.valid_fold), seq_len=seq_len, vocab_size=vocab_size
        )
    task = find_task(name)
    # A task has no text to train a BPE on, and its digits must stay apart.
    tokenizer = Tokenizer.bytes() if config.tokenizer == "bpe" else _given_tokenizer(config)
    _check_size(tokenizer, config, vocab_size)
    return SyntheticDataset(
        task, config.options, seq_len=seq_len, tokenizer=tokenizer, mask_boundaries=config.mask_boundaries
    )


def _open_tokens(
    files: list[TokenFile], config: DataConfig, *, vocab_size: int, seq_len: int, progress: bool, crew: Crew
) -> PackedDataset:
    """Existing tokens; unless validation has its own files, the last `valid_fraction` is held out."""
    if config.tokenizer == "bpe" or config.valid_fold:
        raise ValueError(
            f"data source {config.source!r} is tokens already: set data.tokenizer to what made them (bytes, a "
            "tokenizer.json or hf:NAME), and leave data.valid_fold out"
        )
    tokenizer, cache = _given_tokenizer(config), cache_folder(config.cache)
    _check_size(tokenizer, config, vocab_size)
    held_out = None if config.valid_source is None else find_tokens(config.valid_source, config)
    if config.valid_source is not None and held_out is None:
        raise ValueError(f"data.valid_source {config.valid_source!r} must be tokens (.bin) too, as data.source is")
    scan = scan_tokens([*files, *(held_out or ())], cache, crew=crew, progress=progress)
    check_vocabulary([*files, *(held_out or ())], scan, vocab_size)
    total = sum(len(file.tokens) for file in files)
    kept = total - round(total * config.valid_fraction) if held_out is None else total
    streams: dict[Split, Stream] = {
        "train": TokenStream(files, 0, kept),
        "valid": TokenStream(files, kept) if held_out is None else TokenStream(held_out),
    }
    split_by = f"the last {config.valid_fraction:g}" if held_out is None else "source"
    fingerprint = {"source": config.source, "split_by": split_by, "content": scan.content, "tokenizer": tokenizer.hash}
    fingerprint |= {f"{split}_tokens": len(stream) for split, stream in streams.items()}
    return PackedDataset(
        streams,
        seq_len=seq_len,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
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
        added = " (including an added end-of-document token)" if tokenizer.lacked_end else ""
        raise ValueError(
            f"tokenizer {config.tokenizer!r} has {tokenizer.vocab_size} tokens{added} but "
            f"model.vocab_size is {vocab_size}; "
            f"raise it to at least {tokenizer.vocab_size}"
        )


def _trained_tokenizer(
    corpus: Corpus, config: DataConfig, vocab_size: int, cache: Path, *, progress: bool, crew: Crew
) -> Tokenizer:
    path = cache / "tokenizers" / digest([corpus.key, vocab_size, _SAMPLE]) / "tokenizer.json"

    def train() -> None:
        if path.parent.is_dir():
            return
        total = corpus.characters and min(_SAMPLE, corpus.characters)
        with Progress(f"training a tokenizer on {corpus.source.name}", total, show=progress) as shown:

            def texts():
                for text in corpus.sample(_SAMPLE):
                    shown.advance(len(text))
                    yield text if config.template is None else contents(text)

            tokenizer = Tokenizer.train(texts(), vocab_size=vocab_size)
        with writing(cache), whole_folder(path.parent) as aside:
            tokenizer.save(aside)

    crew.first_does(train)
    try:
        return Tokenizer.load(path)
    except ValueError as error:
        raise ValueError(f"the cached tokenizer {path} is damaged; delete its folder to have it made again") from error


def _check_unchanged(corpus: Corpus, config: DataConfig) -> None:
    """Refuse to cache a text under the name of another."""
    for before, after in ((corpus.source, find_source), (corpus.valid_source, find_valid_source)):
        if before is not None and before.scannable:
            now = after(config)
            if now is None or now.signature != before.signature:
                raise ValueError(
                    f"the files of {before.name!r} changed while they were read; run again once they stay the same"
                )


def _fingerprint(folder: Path, config: DataConfig) -> dict[str, Any]:
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder / 'meta.json'} is missing or damaged; delete the folder {str(folder)!r} to have it made again"
        ) from error
    if config.template is not None:
        # Bits per byte of JSON would mean nothing.
        meta = {key: value for key, value in meta.items() if key not in ("valid_bytes", "valid_hash")}
    return {"source": config.source, **meta}
