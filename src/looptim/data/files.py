"""Documents in local files: text, jsonl and parquet, each optionally compressed. The only importer of pyarrow."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, final

from .chat import chat_text

PIECE = 1 << 20
"""Bytes of a text file held at once; longer files are tokenized in pieces that end at a line."""


@final
@dataclasses.dataclass(frozen=True)
class Document:
    """A text that is packed as one unit: a text file, or a row of jsonl, parquet or a dataset.

    A conversation is its messages as JSON until `chat.Chats` encodes it.
    """

    digest: bytes
    """The hash of the whole text, which decides the document's split."""
    length: int
    """In characters."""
    pieces: Callable[[], Iterable[str]]
    """The text from its beginning, in pieces that fit in memory."""


def row_document(value: Any, *, field: str, chats: bool, where: str) -> Document | None:
    """The document of a row, which is a conversation if `chats`, or None if it is empty."""
    if value is None or value == "":
        return None
    text = chat_text(value, where=f"{where}, field {field!r}") if chats else value
    if not isinstance(text, str):
        other = ", or data.template if it holds conversations" if isinstance(text, list) else ""
        raise ValueError(
            f"{where}: field {field!r} holds {type(text).__name__}, not text; set data.field to one that does{other}"
        )
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: field {field!r} is not valid Unicode (a lone surrogate); repair that row") from None
    return Document(hashlib.sha256(encoded).digest(), len(text), lambda: [text])


def read_documents(path: Path, *, field: str, chats: bool = False) -> Iterator[Document]:
    """The documents of a file, whose type is told by its name; empty ones are left out."""
    kind = Path(path.stem).suffix if _compression(path) else path.suffix
    kind = kind.lower()
    if kind in (".jsonl", ".ndjson"):
        return _jsonl(path, field, chats)
    if kind == ".parquet":
        return _parquet(path, field, chats)
    if chats:
        raise ValueError(f"{path} is text, and data.template is for conversations; give jsonl or parquet")
    return _text(path)


def _text(path: Path) -> Iterator[Document]:
    hash, length, first, count = hashlib.sha256(), 0, "", 0
    for piece in _pieces(path):
        hash.update(piece.encode())
        length += len(piece)
        count += 1
        first = first or piece
    if length:
        # Most files are a single piece, which need not be read again.
        pieces = (lambda: [first]) if count == 1 else partial(_pieces, path)
        yield Document(hash.digest(), length, pieces)


def _pieces(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest, done = "", 0
    with _reading(path) as file:
        while data := file.read(PIECE):
            text = rest + _decode(decoder, data, path, done)
            # A byte order mark is not text.
            text = text.removeprefix("\ufeff") if not done else text
            done += len(data)
            cut = text.rfind("\n") + 1 or len(text)
            if cut:
                yield text[:cut]
            rest = text[cut:]
        _decode(decoder, b"", path, done)
    if rest:
        yield rest


def _decode(decoder: codecs.IncrementalDecoder, data: bytes, path: Path, done: int) -> str:
    try:
        return decoder.decode(data, not data)
    except UnicodeDecodeError as error:
        byte = done + len(data) - len(error.object) + error.start
        raise ValueError(f"{path} is not UTF-8 at byte {byte}; convert it, or leave it out of data.source") from None


def _jsonl(path: Path, field: str, chats: bool) -> Iterator[Document]:
    with _reading(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError:
                raise ValueError(f"{where} is not UTF-8; convert it, or leave it out of data.source") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON ({error.msg}); every line must be one object") from None
            if not isinstance(row, dict) or field not in row:
                known = f"the fields {', '.join(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
                raise ValueError(f"{where} has no field {field!r} but {known}; set data.field to the one with the text")
            if document := row_document(row[field], field=field, chats=chats, where=where):
                yield document


def _parquet(path: Path, field: str, chats: bool) -> Iterator[Document]:
    _pyarrow(path)
    from pyarrow.parquet import ParquetFile

    with _reading(path) as file:
        # Parquet is read from its end, which a compressed stream cannot reach first.
        table = ParquetFile(io.BytesIO(file.read()) if _compression(path) else file)
        names = table.schema_arrow.names
        if field not in names:
            raise ValueError(
                f"{path} has no column {field!r} but {', '.join(names)}; set data.field to the one with the text"
            )
        number = 0
        for batch in table.iter_batches(columns=[field], batch_size=1024):
            for value in batch.column(0).to_pylist():
                number += 1
                if document := row_document(value, field=field, chats=chats, where=f"{path}, row {number}"):
                    yield document


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file; any failure becomes one sentence."""
    try:
        with _open(path) as file:
            yield file
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({_reason(error)}); repair it, or leave it out of data.source"
        ) from error
    except ValueError as error:
        # pyarrow's errors are ValueErrors too, but ours already have the right words.
        if type(error) is ValueError:
            raise
        raise ValueError(
            f"{path} cannot be read ({_reason(error)}); repair it, or leave it out of data.source"
        ) from error


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".")


def _compression(path: Path) -> str | None:
    suffix = path.suffix.lower()
    return suffix if suffix in (".gz", ".xz", ".zst") else None


def _open(path: Path) -> IO[bytes]:
    compression = _compression(path)
    if compression == ".gz":
        return gzip.open(path)  # pyright: ignore[reportReturnType]
    if compression == ".xz":
        return lzma.open(path)
    if compression == ".zst":
        # Python has no zstd before 3.14, but pyarrow has, and parquet needs it anyway.
        return io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
    return open(path, "rb")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ValueError(f"{path} needs pyarrow to be read; install it with pip install 'looptim[data]'") from None
    return pyarrow
