"""Token shards: a header that knows its length, then the tokens, memory-mapped."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

_MAGIC = b"looptim1"
_FIELDS = struct.Struct("<8sQQQ")
"""Magic, bytes per token, tokens, documents; a CRC-32 of them follows."""
_HEADER = 64


def _header(itemsize: int, tokens: int, documents: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, itemsize, tokens, documents)
    return (fields + struct.pack("<I", zlib.crc32(fields))).ljust(_HEADER, b"\0")


@final
class ShardWriter:
    """Appends tokens to a new shard; only `close` makes it a valid one."""

    def __init__(self, path: Path, *, vocab_size: int):
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.tokens = self.documents = 0
        self._file = open(path, "wb")  # noqa: SIM115
        self._file.write(bytes(_HEADER))

    def add(self, tokens: Sequence[int] | np.ndarray, *, end: bool) -> None:
        """Some tokens; `end` says that a document ends with them."""
        self._file.write(np.asarray(tokens, dtype=self.dtype).tobytes())
        self.tokens += len(tokens)
        self.documents += end

    def close(self) -> None:
        """Writes the header. What is on the disk is still to be synced."""
        self._file.seek(0)
        self._file.write(_header(self.dtype.itemsize, self.tokens, self.documents))
        self._file.close()

    def abandon(self) -> None:
        """Lets go of the file without making it valid."""
        # Closing flushes, and on a full disk that fails once more.
        with contextlib.suppress(OSError):
            self._file.close()


def open_shard(path: Path) -> np.ndarray:
    """The tokens of a shard, memory-mapped; a shard that is not whole is refused."""
    way_out = f"delete the folder {str(path.parent)!r} and it is made anew"
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
        raise ValueError(f"shard {path} is truncated: {size} bytes instead of {_HEADER + tokens * itemsize}; {way_out}")
    if not tokens:
        # An empty file cannot be mapped into memory.
        return np.zeros(0, dtype=f"<u{itemsize}")
    return np.memmap(path, dtype=f"<u{itemsize}", mode="r", offset=_HEADER, shape=(tokens,))
