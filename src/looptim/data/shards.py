"""Token shards: a header with the length, then the tokens, memory-mapped; and digests of their blocks."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from ..base.files import write_whole

_MAGIC = b"looptim1"
_FIELDS = struct.Struct("<8sQQQ")
"""Magic, bytes per token, tokens, documents; a CRC-32 of them follows."""
_HEADER = 64
_BLOCK = 1 << 14
"""Bytes of tokens per SHA-256: few enough to check a block whenever some of it is read."""
_DIGEST = hashlib.sha256().digest_size


def _header(itemsize: int, tokens: int, documents: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, itemsize, tokens, documents)
    return (fields + struct.pack("<I", zlib.crc32(fields))).ljust(_HEADER, b"\0")


@final
class ShardWriter:
    """Appends tokens to a new shard; only `close` makes it a valid one."""

    def __init__(self, path: Path, *, vocab_size: int):
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.tokens = self.documents = 0
        self.path = path
        self._file = open(path, "wb")  # noqa: SIM115
        self._file.write(bytes(_HEADER))

    def add(self, tokens: Sequence[int] | np.ndarray, *, end: bool) -> None:
        """Append tokens; `end` says that a document ends with them."""
        self._file.write(np.asarray(tokens, dtype=self.dtype).tobytes())
        self.tokens += len(tokens)
        self.documents += end

    def close(self) -> None:
        """Write the header and the digests. Nothing is synced to disk yet."""
        self._file.seek(0)
        self._file.write(_header(self.dtype.itemsize, self.tokens, self.documents))
        self._file.close()
        _digests_file(self.path).write_bytes(_digest_blocks(_map_tokens(self.path, self.dtype, self.tokens)))

    def abandon(self) -> None:
        """Close the file without making it valid."""
        # Closing flushes, which on a full disk fails a second time.
        with contextlib.suppress(OSError):
            self._file.close()


@final
class Shard:
    """The tokens of a shard; each block is checked whenever it is read."""

    def __init__(self, path: Path):
        """Open a shard; an incomplete one is refused."""
        self._path, self._way_out = path, f"delete the folder {str(path.parent)!r} to have it made again"
        self.tokens = self._open()
        file = _digests_file(path)
        if not file.is_file():
            # The shard is older than digests; it gets some now if the cache is writable.
            with contextlib.suppress(OSError):
                write_whole(file, _digest_blocks(self.tokens))
        self._digests = file.read_bytes() if file.is_file() else _digest_blocks(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`."""
        size = self.tokens.itemsize
        content = self.tokens.view(np.uint8)
        for block in range(start * size // _BLOCK, -(-stop * size // _BLOCK)):
            digest = hashlib.sha256(content[block * _BLOCK : (block + 1) * _BLOCK].data).digest()
            if digest != self._digests[block * _DIGEST : (block + 1) * _DIGEST]:
                raise ValueError(
                    f"shard {self._path} is damaged: the {_BLOCK} bytes of tokens from {block * _BLOCK} on are not as "
                    f"they were written; {self._way_out}"
                )
        return self.tokens[start:stop]

    def document_ends(self, start: int, stop: int) -> None:
        """None, since every document was packed with an end token."""

    def counted(self, start: int, stop: int) -> None:
        """None, since every token of a text is a target."""

    def _open(self) -> np.ndarray:
        path, way_out = self._path, self._way_out
        try:
            with open(path, "rb") as file:
                head = file.read(_HEADER)
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f"shard {path} cannot be read ({error.strerror}); {way_out}") from error
        if len(head) < _HEADER:
            raise ValueError(f"shard {path} is truncated: {len(head)} bytes are no header; {way_out}")
        _, itemsize, tokens, documents = _FIELDS.unpack_from(head)
        if itemsize not in (2, 4) or head != _header(itemsize, tokens, documents):
            raise ValueError(f"shard {path} is damaged: its header does not match its checksum; {way_out}")
        if size != _HEADER + tokens * itemsize:
            wanted = _HEADER + tokens * itemsize
            raise ValueError(f"shard {path} is truncated: {size} bytes instead of {wanted}; {way_out}")
        return _map_tokens(path, np.dtype(f"<u{itemsize}"), tokens)


def _digests_file(shard: Path) -> Path:
    return shard.with_suffix(".sha256")


def _map_tokens(path: Path, dtype: np.dtype, tokens: int) -> np.ndarray:
    if not tokens:
        # An empty file cannot be mapped.
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=_HEADER, shape=(tokens,))


def _digest_blocks(tokens: np.ndarray) -> bytes:
    content = tokens.view(np.uint8)
    return b"".join(hashlib.sha256(content[i : i + _BLOCK].data).digest() for i in range(0, len(content), _BLOCK))
