"""Writing a corpus as token shards, by one process or by many."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base.console import Progress
from ..base.files import write_whole
from .chat import Chats
from .corpus import SPLITS, Corpus, Split, hash_files
from .shards import Shard, ShardWriter
from .together import Crew
from .tokenizer import Tokenizer

_TOGETHER = 4 << 20
"""Characters to tokenize at once."""

Encoder = Tokenizer | Chats
"""What makes tokens of documents."""

Note = Callable[[bytes], Any]
"""A consumer of bytes: it hashes them, or keeps them to be hashed in order later."""


def pack(corpus: Corpus, encoder: Encoder, folder: Path, progress: bool) -> None:
    """Write both splits of a corpus as shards, with their metadata in meta.json."""
    content, held_out = hashlib.sha256(), hashlib.sha256()
    writers, valid_bytes = _write(corpus, encoder, folder, content.update, held_out.update, progress=progress)
    _finish(corpus, encoder, folder, writers, content.hexdigest(), (held_out.hexdigest(), valid_bytes))


def pack_together(corpus: Corpus, encoder: Encoder, folder: Path, crew: Crew, *, progress: bool) -> None:
    """Write the same files, bit for bit, with many processes: each tokenizes its part, and the first joins them."""

    def write_part() -> list[int]:
        mine = folder / f"part-{crew.rank}"
        mine.mkdir()
        part = corpus.part(crew.rank, crew.size)
        with (mine / "documents").open("wb") as content, (mine / "held_out").open("wb") as held_out:
            show = progress and crew.rank == 0
            writers, _ = _write(part, encoder, mine, content.write, held_out.write, progress=show)
        return [writers[split].documents for split in SPLITS]

    def join(documents: list[list[int]]) -> None:
        parts = [folder / f"part-{rank}" for rank in range(crew.size)]
        with contextlib.ExitStack() as stack:
            writers = _open_writers(folder, encoder, stack)
            for part, counts in zip(parts, documents, strict=True):
                for split, count in zip(SPLITS, counts, strict=True):
                    writers[split].add(Shard(part / f"{split}.bin").tokens, end=False)
                    writers[split].documents += count
            for writer in writers.values():
                writer.close()
        held_out = [part / "held_out" for part in parts]
        size = sum(path.stat().st_size for path in held_out)
        content = hash_files(part / "documents" for part in parts)
        _finish(corpus, encoder, folder, writers, content, (hash_files(held_out), size))
        for part in parts:
            shutil.rmtree(part)

    documents = crew.gather(crew.all_do(write_part))
    crew.first_does(lambda: join(documents))


def _open_writers(folder: Path, encoder: Encoder, stack: contextlib.ExitStack) -> dict[Split, ShardWriter]:
    writers: dict[Split, ShardWriter] = {}
    for split in SPLITS:
        writers[split] = ShardWriter(folder / f"{split}.bin", vocab_size=encoder.vocab_size)
        stack.callback(writers[split].abandon)
    return writers


def _write(
    corpus: Corpus, encoder: Encoder, folder: Path, content: Note, held_out: Note, *, progress: bool
) -> tuple[dict[Split, ShardWriter], int]:
    """Write the shards of a corpus; returns the number of held-out bytes."""
    valid_bytes = 0
    with contextlib.ExitStack() as stack:
        title = f"tokenizing {corpus.source.name}"
        shown = stack.enter_context(Progress(title, corpus.characters, show=progress))
        writers = _open_writers(folder, encoder, stack)
        waiting: list[tuple[Split, str, bool]] = []
        size, last = 0, None
        for document, split, pieces in corpus.parts():
            if document is not last:
                content(document.digest)
                last = document
            started = False
            for piece in pieces:
                started = True
                if split == "valid":
                    held_out(text := piece.encode())
                    valid_bytes += len(text)
                waiting.append((split, piece, False))
                size += len(piece)
                if size >= _TOGETHER:
                    _flush(waiting, writers, encoder)
                    shown.advance(size)
                    size = 0
            if started:
                waiting.append((split, "", True))
        _flush(waiting, writers, encoder)
        shown.advance(size)
        for writer in writers.values():
            writer.close()
    return writers, valid_bytes


def _flush(waiting: list[tuple[Split, str, bool]], writers: dict[Split, ShardWriter], encoder: Encoder) -> None:
    encoded = encoder.encode_many([text for _, text, _ in waiting])
    for (split, _, end), tokens in zip(waiting, encoded, strict=True):
        writers[split].add(encoder.end if end else tokens, end=end)
    waiting.clear()


def _finish(
    corpus: Corpus,
    encoder: Encoder,
    folder: Path,
    writers: dict[Split, ShardWriter],
    content: str,
    held_out: tuple[str, int],
) -> None:
    """Write the metadata, which completes the packing."""
    _check_packed(corpus, writers)
    meta: dict[str, Any] = {"split_by": corpus.by, "content": content, "tokenizer": encoder.hash}
    for split, writer in writers.items():
        meta |= {f"{split}_tokens": writer.tokens, f"{split}_documents": writer.documents}
    meta |= {"valid_bytes": held_out[1], "valid_hash": held_out[0]}
    write_whole(folder / "meta.json", json.dumps(meta, indent=2) + "\n")


def _check_packed(corpus: Corpus, writers: dict[Split, ShardWriter]) -> None:
    """Check for errors that only show in a stream; files have been read before."""
    if not writers["train"].tokens and not writers["valid"].tokens:
        raise ValueError(f"data source {corpus.source.name!r} holds no text; check data.split and data.field")
    train, valid = writers["train"].documents, writers["valid"].documents
    held_out = corpus.characters is None and corpus.fraction > 0
    if held_out and not (train and valid):
        raise ValueError(
            f"the {train + valid} documents of {corpus.source.name!r} leave a split empty at data.valid_fraction "
            f"{corpus.fraction}; change it, or set data.valid_source or options.valid_split"
        )
