"""Corpora that are already tokens, memory-mapped: `.bin` of llm.c and nanoGPT, `.bin` and `.idx` of Megatron."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from ..base.console import Progress
from ..base.files import write_whole
from ..config import DataConfig
from .cache import digest, writing
from .sources import list_files, match_files, scheme_of
from .together import Crew

_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""The magic number and version of llm.c's files, and the width of their tokens."""
_LLM_C_HEADER = 1024
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MEGATRON_HEADER = 34
"""Magic, version, dtype code, number of sequences, number of documents."""
_CHUNK = 1 << 26
"""Bytes per SHA-256; processes that scan a corpus take turns at these."""


class TokenFile(NamedTuple):
    """The tokens of a file, and the ends of its documents, which is None if the end token tells."""

    path: Path
    tokens: np.ndarray
    ends: np.ndarray | None


@final
class TokenStream:
    """The tokens of several files in a row, or a range of them."""

    def __init__(self, files: Sequence[TokenFile], start: int = 0, stop: int | None = None):
        self.files = list(files)
        self.offsets = [0, *itertools.accumulate(len(file.tokens) for file in files)]
        self.start, self.stop = start, self.offsets[-1] if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`."""
        return np.concatenate([file.tokens[a:b] for file, a, b in self._pieces(start, stop)])

    def counted(self, start: int, stop: int) -> None:
        """None, since every token is a target."""

    def document_ends(self, start: int, stop: int) -> np.ndarray | None:
        """Whether each of these tokens ends a document; None if the end token tells."""
        if self.files[0].ends is None:
            return None
        ends = np.zeros(stop - start, dtype=bool)
        done = 0
        for file, a, b in self._pieces(start, stop):
            assert file.ends is not None
            first, last = np.searchsorted(file.ends, (a, b))
            ends[file.ends[first:last] - a + done] = True
            done += b - a
        return ends

    def _pieces(self, start: int, stop: int) -> list[tuple[TokenFile, int, int]]:
        """The files that contain a range of tokens, with the first and last position in each."""
        start, stop = start + self.start, stop + self.start
        first = bisect.bisect_right(self.offsets, start) - 1
        pieces = []
        for file, offset in zip(self.files[first:], self.offsets[first:], strict=False):
            if offset >= stop:
                break
            pieces.append((file, max(start - offset, 0), min(stop - offset, len(file.tokens))))
        return pieces


def find_tokens(source: str, config: DataConfig) -> list[TokenFile] | None:
    """The files of a source whose names end in `.bin` and which therefore hold tokens; None if it is text."""
    if source == "stdlib" or scheme_of(source):
        return None
    paths = [path for path in match_files(source) if path.suffix != ".idx"]
    kinds = {path.suffix == ".bin" for path in paths}
    if True not in kinds:
        return None
    if len(kinds) > 1:
        raise ValueError(f"data source {source!r} names text and tokens (.bin); name one kind, or make it a mixture")
    files = [_open(path, config) for path in paths]
    if len({file.ends is None for file in files}) > 1:
        raise ValueError(f"of the files of {source!r} some have an .idx and some have none; name one kind")
    return files


def _open(path: Path, config: DataConfig) -> TokenFile:
    unknown = sorted(config.options.keys() - {"dtype"})
    dtype = config.options.get("dtype", "uint16")
    if unknown or dtype not in ("uint16", "uint32"):
        raise ValueError(
            f"data.options of {str(path)!r} must be empty or have a dtype, uint16 or uint32, got {config.options}"
        )
    try:
        index = path.with_suffix(".idx")
        if index.is_file():
            return _megatron(path, index)
        with path.open("rb") as file:
            magic, version, count = struct.unpack("<3i", file.read(12).ljust(12))
        known = _LLM_C.get((magic, version))
        if known is None:
            # nanoGPT's files contain nothing but tokens.
            return TokenFile(path, _map(path, np.dtype(dtype).newbyteorder("<")), None)
        tokens = _map(path, np.dtype(known), offset=_LLM_C_HEADER)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as tokens ({_reason(error)}); repair it, or leave it out") from error
    if len(tokens) != count:
        raise ValueError(f"{path} is truncated: {len(tokens)} tokens instead of {count}; restore it from a copy")
    return TokenFile(path, tokens, None)


def _megatron(path: Path, index: Path) -> TokenFile:
    with index.open("rb") as file:
        head = file.read(_MEGATRON_HEADER)
    if not head.startswith(_MEGATRON) or len(head) < _MEGATRON_HEADER:
        raise ValueError(f"{index.name} does not begin as an index of Megatron does")
    version, sequences, documents = (int.from_bytes(head[at : at + 8], "little") for at in (9, 18, 26))
    if version != 1 or head[17] not in _MEGATRON_DTYPES:
        raise ValueError(f"{index.name} is of version {version} and dtype {head[17]}, which are not known")
    after = _MEGATRON_HEADER + 12 * sequences
    if index.stat().st_size < after + 8 * documents:
        raise ValueError(f"{index.name} is truncated")
    lengths = np.memmap(index, "<i4", "r", _MEGATRON_HEADER, (sequences,))
    first_sequences = np.memmap(index, "<i8", "r", after, (documents,))
    tokens = _map(path, np.dtype(_MEGATRON_DTYPES[head[17]]))
    stops = np.cumsum(lengths, dtype=np.int64)
    if len(tokens) != stops[-1]:
        raise ValueError(f"it has {len(tokens)} tokens, and {index.name} tells of {stops[-1]}")
    # A document ends where the next one begins; the last entry lies after all of them.
    return TokenFile(path, tokens, stops[first_sequences[1:] - 1] - 1)


def _map(path: Path, dtype: np.dtype, offset: int = 0) -> np.ndarray:
    size = path.stat().st_size - offset
    if size <= 0 or size % dtype.itemsize:
        raise ValueError(f"its {size} bytes are no whole number of tokens of {dtype.itemsize} bytes, or none")
    return np.memmap(path, dtype, "r", offset)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@final
@dataclasses.dataclass(frozen=True)
class TokenScan:
    """The contents of a token corpus: the hash of all tokens, and the largest token of each file."""

    content: str
    largest: list[int]


def scan_tokens(files: Sequence[TokenFile], cache: Path, *, crew: Crew, progress: bool) -> TokenScan:
    """Scan all tokens once, divided over the processes; cached under names, sizes and times of files."""
    memo = cache / "scans" / f"{digest(['tokens', list_files([file.path for file in files])])}.json"
    if not crew.gather(memo.is_file())[0]:
        chunks = [
            (number, start, start + _CHUNK // file.tokens.itemsize)
            for number, file in enumerate(files)
            for start in range(0, len(file.tokens), _CHUNK // file.tokens.itemsize)
        ]
        mine = crew.all_do(lambda: _look_through(files, chunks[crew.rank :: crew.size], progress and crew.rank == 0))
        found: list[Any] = [None] * len(chunks)
        for rank, each in enumerate(crew.gather(mine)):
            found[rank :: crew.size] = each
        content = digest([of_chunk for of_chunk, _ in found])
        largest = [max(m for (n, *_), (_, m) in zip(chunks, found, strict=True) if n == k) for k in range(len(files))]
        with writing(cache):
            text = json.dumps(dataclasses.asdict(TokenScan(content, largest)))
            crew.first_does(lambda: write_whole(memo, text))
    try:
        return TokenScan(**json.loads(memo.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{memo} is damaged; delete it") from error


def _look_through(
    files: Sequence[TokenFile], chunks: Sequence[tuple[int, int, int]], progress: bool
) -> list[tuple[str, int]]:
    """The hash and the largest token of each chunk; a negative one counts as too large for any vocabulary."""
    found = []
    with Progress("reading tokens", len(chunks), show=progress) as shown:
        for number, start, stop in chunks:
            tokens = files[number].tokens[start:stop]
            largest = int(tokens.max()) if int(tokens.min()) >= 0 else np.iinfo(np.int64).max
            found.append((hashlib.sha256(tokens.tobytes()).hexdigest(), largest))
            shown.advance()
    return found


def check_vocabulary(files: Sequence[TokenFile], scan: TokenScan, vocab_size: int) -> None:
    """Check that the model knows every token."""
    for file, largest in zip(files, scan.largest, strict=True):
        if largest >= vocab_size:
            negative = largest == np.iinfo(np.int64).max
            raise ValueError(
                f"{file.path} has {'a negative token' if negative else f'the token {largest}'}, and model.vocab_size "
                f"is {vocab_size}; give the tokenizer and vocabulary that made it"
            )
