"""A corpus: the documents of a source, each assigned to one split, the same on every machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, final

from ..base.console import Progress
from ..base.files import write_whole
from ..config import DataConfig
from .cache import digest, writing
from .files import Document
from .sources import Source, find_source, find_valid_source
from .together import ALONE, Crew, shared_folder

Split = Literal["train", "valid"]
SPLITS: tuple[Split, Split] = ("train", "valid")

_FORMAT = 1
"""A part of every cache key; raise it when the same text would be cut differently."""
_BLOCK = 1 << 24
"""Bytes of a file to read at once."""


@final
@dataclasses.dataclass(frozen=True)
class Corpus:
    """The documents of a source, and how they are split.

    `by` is "document": a document goes to `valid` if the hash of its text falls into the fold's share, so equal
    documents are on the same side; "tail": the end of every document is held out, for corpora of so few documents that
    hashing leaves a split empty; or "source": validation has a source of its own.
    """

    source: Source
    valid_source: Source | None
    fraction: float
    fold: int
    by: Literal["document", "tail", "source"]
    key: str
    """The corpus's key in the cache, which changes with its text and its split."""
    characters: int | None
    """None until a stream has been read."""

    def parts(self) -> Iterator[tuple[Document, Split, Iterable[str]]]:
        """The part of each document that each split has, in order."""
        for document in self.source.documents():
            if self.by == "tail":
                yield document, "train", _cut(document, self.fraction, tail=False)
                yield document, "valid", _cut(document, self.fraction, tail=True)
            else:
                yield document, held_out(document, self.fraction, self.fold), document.pieces()
        if self.valid_source is not None:
            for document in self.valid_source.documents():
                yield document, "valid", document.pieces()

    def part(self, number: int, parts: int) -> Corpus:
        """One of several consecutive parts of the whole; the last also has the separate validation source, if any."""
        valid_source = self.valid_source if number == parts - 1 else None
        characters = None if self.characters is None else self.characters // parts
        part = self.source.part(number, parts)
        return dataclasses.replace(self, source=part, valid_source=valid_source, characters=characters)

    def sample(self, characters: int) -> Iterator[str]:
        """Pieces of the training split, about this many characters in all, spread evenly over it."""
        rate = 1.0 if self.characters is None else characters / self.characters
        left = characters
        for _, split, pieces in self.parts():
            for piece in pieces if split == "train" else ():
                if zlib.crc32(piece.encode()) < rate * 2**32:
                    yield piece
                    left -= len(piece)
            if left <= 0:
                return


def held_out(document: Document, fraction: float, fold: int) -> Split:
    """The split of a document, by the hash of its text; different folds hold out disjoint documents."""
    place = int.from_bytes(document.digest[:8], "big") / 2**64
    return "valid" if fold * fraction <= place < (fold + 1) * fraction else "train"


def find_corpus(config: DataConfig, *, cache: Path, progress: bool, crew: Crew = ALONE) -> Corpus:
    """The corpus that a config names. Files are read through once, and again only if they changed."""
    source, valid_source = find_source(config), find_valid_source(config)
    sources = [source] if valid_source is None else [source, valid_source]
    fraction = config.valid_fraction if valid_source is None else 0.0
    fold = config.valid_fold
    by = "document" if valid_source is None else "source"
    scans = [_scan(each, fraction, fold, cache, progress, crew) for each in sources if each.scannable]
    if len(scans) < len(sources):
        key = digest([_FORMAT, by, fraction, fold, [each.signature for each in sources]])
        return Corpus(source, valid_source, fraction, fold, by, key, None)
    if by == "document" and fraction and not (scans[0].train and scans[0].valid):
        if fold:
            raise ValueError(
                f"data.valid_fold {fold} leaves a split of {source.name!r} empty: it has too few documents; give more, "
                "or leave valid_fold out"
            )
        if config.template is not None:
            raise ValueError(
                f"data.valid_fraction {fraction} leaves a split of {source.name!r} empty: it has too few "
                "conversations; raise it, or set data.valid_source"
            )
        by = "tail"
    key = digest([_FORMAT, by, fraction, fold, [scan.content for scan in scans]])
    return Corpus(source, valid_source, fraction, fold, by, key, sum(scan.characters for scan in scans))


@final
@dataclasses.dataclass(frozen=True)
class _Scan:
    content: str
    characters: int
    train: int
    """The number of documents that the hash assigns to each split."""
    valid: int


def _scan(source: Source, fraction: float, fold: int, cache: Path, progress: bool, crew: Crew) -> _Scan:
    """The hash of a source's documents, cached under its files' names, sizes and times; processes share the work."""
    memo = cache / "scans" / f"{digest([_FORMAT, source.signature, fraction, fold])}.json"
    if not crew.gather(memo.is_file())[0]:
        with writing(cache), shared_folder(memo, crew, keep=False) as folder:
            counts = crew.gather(crew.all_do(lambda: _read_part(source, fraction, fold, folder, progress, crew)))
            train, valid, characters = (sum(column) for column in zip(*counts, strict=True))
            content = crew.first_does(lambda: hash_files([folder / str(part) for part in range(crew.size)]))
        if not characters:
            raise ValueError(
                f"data source {source.name!r} holds no text, all its files are empty; give files with text"
            )
        text = json.dumps({"content": content, "characters": characters, "train": train, "valid": valid})
        with writing(cache):
            crew.first_does(lambda: write_whole(memo, text))
    try:
        return _Scan(**json.loads(memo.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{memo} is damaged; delete it") from error


def _read_part(
    source: Source, fraction: float, fold: int, folder: Path, progress: bool, crew: Crew
) -> tuple[int, int, int]:
    """Record the digests of this process's documents; returns the documents per split and their characters."""
    characters, counts = 0, {"train": 0, "valid": 0}
    show = progress and crew.rank == 0
    with (folder / str(crew.rank)).open("wb") as file, Progress(f"reading {source.name}", show=show) as shown:
        for document in source.part(crew.rank, crew.size).documents():
            file.write(document.digest)
            characters += document.length
            counts[held_out(document, fraction, fold)] += 1
            shown.advance(document.length)
    return counts["train"], counts["valid"], characters


def hash_files(paths: Iterable[Path]) -> str:
    """The SHA-256 of several files, one after another."""
    content = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                content.update(block)
    return content.hexdigest()


def _cut(document: Document, fraction: float, *, tail: bool) -> Iterator[str]:
    """A document without its last `fraction` of characters, or that end alone, cut at a line's end if possible."""
    left = document.length - round(document.length * fraction)
    for piece in document.pieces():
        if left >= len(piece):
            head, end = piece, ""
        else:
            at = max(left, 0)
            at = piece.rfind("\n", 0, at) + 1 or at
            head, end = piece[:at], piece[at:]
        left -= len(piece)
        if part := end if tail else head:
            yield part
