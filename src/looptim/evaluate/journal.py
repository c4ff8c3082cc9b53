"""What an evaluation has on disc: results that are whole or absent, and the answers of a task that is under way."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, final

from ..rundir import write_whole

PARTIAL = ".partial"


def write_result(path: Path, value: Any) -> None:
    """A result as JSON, whole or not at all."""
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
    """The answers to the requests of one task, each on disc as soon as it is known.

    Answers given under other settings are dropped; a last line that a kill has cut is ignored.
    """

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]):
        self.path = folder / PARTIAL / f"{name}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.answers: dict[str, Any] = {}
        # As they are when they come back.
        settings = json.loads(json.dumps(settings, default=str))
        lines = self._lines()
        if lines[:1] == [{"settings": settings}]:
            self.answers = {line["key"]: line["answer"] for line in lines[1:]}
        self.file = self.path.open("w", encoding="utf-8")
        self._write({"settings": settings})
        for key, answer in self.answers.items():
            self._write({"key": key, "answer": answer})

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        if self.path.is_file():
            with contextlib.suppress(ValueError):
                for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                    lines.append(json.loads(text))
        return lines

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.file.flush()

    def add(self, key: str, answer: Any) -> None:
        """An answer; a power cut may take the last ones, a kill of the process does not."""
        if key not in self.answers:
            self.answers[key] = answer
            self._write({"key": key, "answer": answer})

    def close(self, *, done: bool) -> None:
        """Kept for a rerun unless the task is done."""
        self.file.close()
        if done:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()
