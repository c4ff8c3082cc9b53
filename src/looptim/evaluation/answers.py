"""What an evaluation has on disc: results that are whole or absent, and the answers of a task that is under way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from ..base.files import write_whole

PARTIAL = ".partial"


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Words what the disc refuses."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write results to {folder}: {error.strerror or error}; make room there, or choose another --out"
        ) from None


def write_result(path: Path, value: Any) -> None:
    """A result as JSON, whole or not at all."""
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def read(path: Path) -> dict[str, Any] | None:
    """A result, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@final
class Journal:
    """The answers to the requests of the task whose result will be `path`, each on disc as soon as it is known.

    Answers given under other settings are dropped; a last line that a kill has cut is ignored.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.folder = path.parent
        self.path = self.folder / PARTIAL / f"{path.stem}.jsonl"
        self.answers: dict[str, Any] = {}
        with writing(self.folder):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = self._restore(settings) if self.path.is_file() else 0
            # What is there stays: it could not be written again if the disc is full, or a kill comes.
            self.file = self.path.open("a", encoding="utf-8")
            self.file.truncate(kept)
        if not kept:
            self._write({"settings": settings})

    def _restore(self, settings: dict[str, Any]) -> int:
        """Take over what is there, and return how many bytes of it are whole lines."""
        size = 0
        for text in self.path.read_bytes().splitlines(keepends=True):
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not text.endswith(b"\n") or (size == 0 and line != {"settings": settings}):
                break
            if size:
                self.answers[line["key"]] = line["answer"]
            size += len(text)
        return size

    def _write(self, line: dict[str, Any]) -> None:
        with writing(self.folder):
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def add(self, key: str, answer: Any) -> None:
        """An answer; a power cut may take the last ones, a kill of the process does not."""
        if key not in self.answers:
            self.answers[key] = answer
            self._write({"key": key, "answer": answer})

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        # Whatever is not on disc by now has been complained about.
        with contextlib.suppress(OSError):
            self.file.close()

    def remove(self) -> None:
        """Once the result is written."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
