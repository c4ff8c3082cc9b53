"""What `data.source` names: the standard library, local files or an hf: dataset. The only importer of datasets."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import difflib
import glob
import itertools
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

from ..config import DataConfig
from .cache import digest
from .files import Document, read_documents, row_document

T = TypeVar("T")

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@final
@dataclasses.dataclass(frozen=True)
class Source:
    """Documents in a fixed order, with a cheap signature that changes when they may have changed."""

    name: str
    signature: str
    read: Callable[[int, int], Iterator[Document]]
    """One of several consecutive parts of the documents."""
    scannable: bool
    """Whether an extra pass over the data is fine, as for local files but not for a network stream."""
    share: tuple[int, int] = (0, 1)
    """The number of this part, and the number of parts."""

    def documents(self) -> Iterator[Document]:
        return self.read(*self.share)

    def part(self, number: int, parts: int) -> Source:
        """One of several parts, which may be empty."""
        return dataclasses.replace(self, share=(number, parts))


def find_source(config: DataConfig) -> Source:
    """The source to train on."""
    opened = SCHEMES.get(scheme_of(config.source))
    return _local(config.source, config) if opened is None else opened(config, config.split)


def scheme_of(source: str) -> str:
    """The word before the colon in a source that names no files; empty for paths."""
    scheme, colon, _ = source.partition(":")
    return scheme if colon and scheme in (*SCHEMES, "synthetic") else ""


def find_valid_source(config: DataConfig) -> Source | None:
    """The source to validate on; None if part of the training source is held out."""
    opened = SCHEMES.get(scheme_of(config.source))
    if opened is not None and "valid_split" in config.options:
        if config.valid_source is not None:
            raise ValueError(
                f"data.valid_source {config.valid_source!r} and data.options.valid_split "
                f"{config.options['valid_split']!r} both name what is held out; give one"
            )
        return opened(config, config.options["valid_split"])
    if config.valid_source is None:
        return None
    if scheme_of(config.valid_source):
        raise ValueError(
            f"data.valid_source {config.valid_source!r} must name files; "
            "for another split of an hf: source set data.options.valid_split"
        )
    return _local(config.valid_source, config)


def _local(source: str, config: DataConfig) -> Source:
    if config.options and not scheme_of(config.source):
        raise ValueError(
            f"data.options {sorted(config.options)} are not options of source {source!r}; "
            "they belong to hf: and synthetic: sources"
        )
    chats = config.template is not None
    paths = _library() if source == "stdlib" else match_files(source)
    sizes = [path.stat().st_size for path in paths]

    def read(part: int, parts: int) -> Iterator[Document]:
        for path in cut_evenly(paths, sizes, part, parts):
            yield from read_documents(path, field=config.field, chats=chats)

    name = f"stdlib of Python {platform.python_version()}" if source == "stdlib" else source
    return Source(name, digest([config.field, *_marks(config), list_files(paths)]), read, scannable=True)


def _marks(config: DataConfig) -> list[str]:
    """What distinguishes the same rows read as conversations."""
    return [] if config.template is None else ["chats"]


def list_files(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """What files look like from outside: paths, sizes and times."""
    return [(str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]


def cut_evenly(items: Sequence[T], sizes: Sequence[int], part: int, parts: int) -> Sequence[T]:
    """One of several runs of neighboring items of about equal total size; together they are all items in order.

    >>> [cut_evenly("abcd", [1, 1, 1, 3], part, 2) for part in range(2)]
    ['abc', 'd']
    """
    total = max(1, sum(sizes))
    # An item belongs to the part that contains its middle.
    middles = [2 * end - size for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    owners = [min(parts - 1, middle * parts // (2 * total)) for middle in middles]
    return items[bisect.bisect_left(owners, part) : bisect.bisect_right(owners, part)]


def _library() -> list[Path]:
    """The standard library's own sources, without its tests and without what differs between machines."""
    paths = []
    for folder, inner, files in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY and not name.startswith("config-")]
        paths += [
            Path(folder, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not paths:
        raise ValueError("this Python ships without its standard library's source; set data.source to files of yours")
    return sorted(paths)


def match_files(source: str) -> list[Path]:
    """The files of a path, folder or glob, sorted and without hidden ones."""
    path = Path(source).expanduser()
    if path.is_dir():
        names = glob.glob("**/*", root_dir=path, recursive=True)
        paths = [path / name for name in names]
    else:
        paths = [path] if path.is_file() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    paths = sorted(path for path in paths if path.is_file())
    if not paths:
        schemes = [*SCHEMES, "synthetic"]
        near = difflib.get_close_matches(source, ["stdlib", *(f"{scheme}:" for scheme in schemes)], n=1)
        hint = f"did you mean {near[0]!r}, or " if near else ""
        raise ValueError(
            f"data source {source!r} matches no file; {hint}give stdlib, a path or glob, "
            + " or ".join(f"{scheme}:NAME" for scheme in schemes)
        )
    return paths


def _hugging_face(config: DataConfig, split: str) -> Source:
    """A split of a dataset, streamed; options go to `datasets`, except `max_documents` and `valid_split`."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"source {config.source!r} needs datasets; install it with pip install 'looptim[data]'"
        ) from None
    options = {key: value for key, value in config.options.items() if key not in ("max_documents", "valid_split")}
    limit, chats = config.options.get("max_documents"), config.template is not None
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"data.options.max_documents must be a whole number of at least 1, got {limit!r}")
    with _worded(config.source):
        builder: Any = datasets.load_dataset_builder(config.source.removeprefix("hf:"), config.name, **options)

    def read(part: int, parts: int) -> Iterator[Document]:
        with _worded(config.source):
            stream = builder.as_streaming_dataset(split=split)
            # Processes share the files of a dataset, but nobody knows in advance where a limit on documents ends.
            parts = 1 if limit is not None else min(parts, stream.num_shards)
            if part >= parts:
                return
            rows = iter(stream if parts == 1 else stream.shard(parts, part, contiguous=True))
        for number in itertools.count(1) if limit is None else range(1, limit + 1):
            with _worded(config.source):
                row = next(rows, None)
            if row is None:
                return
            where = f"{config.source}, row {number}"
            if config.field not in row:
                known = ", ".join(row)
                raise ValueError(
                    f"{where} has no field {config.field!r} but {known}; set data.field to the one with the text"
                )
            if document := row_document(row[config.field], field=config.field, chats=chats, where=where):
                yield document

    # The hash covers the commit, the configuration, and local files with their times.
    identity = [config.source, config.field, *_marks(config), split, limit, builder.hash, builder.config_id]
    return Source(config.source, digest(identity), read, scannable=False)


SCHEMES: dict[str, Callable[[DataConfig, str], Source]] = {"hf": _hugging_face}
"""What opens a split of documents that are not files, by the word before the colon in `data.source`."""


@contextlib.contextmanager
def _worded(source: str) -> Iterator[None]:
    # The many backends of datasets raise all kinds of errors.
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{source} cannot be loaded: {lines[0].rstrip('.')}; check data.source, name, split and options"
        ) from error
