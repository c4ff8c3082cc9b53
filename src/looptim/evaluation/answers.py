"""The answers of a task during its evaluation; they survive a kill."""

from __future__ import annotations

import contextlib
import json
from typing import Any, final

from ..rundir import Evaluation


@final
class Answers:
    """The answers to a task's requests, each on disk as soon as it is known.

    Answers given under other settings are dropped; a last line that a kill cut off is ignored.
    """

    def __init__(self, evaluation: Evaluation, settings: dict[str, Any]):
        self.evaluation = evaluation
        self.path = evaluation.answers
        self.known: dict[str, Any] = {}
        with evaluation.writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = self._restore(settings) if self.path.is_file() else 0
            # Answers on disk are not rewritten, since a full disk or a kill in between would lose them.
            self.file = self.path.open("a", encoding="utf-8")
            self.file.truncate(kept)
        if not kept:
            self._write({"settings": settings})

    def _restore(self, settings: dict[str, Any]) -> int:
        """Read existing answers, and return how many bytes of the file are complete lines."""
        size = 0
        for text in self.path.read_bytes().splitlines(keepends=True):
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not text.endswith(b"\n") or (size == 0 and line != {"settings": settings}):
                break
            if size:
                self.known[line["key"]] = line["answer"]
            size += len(text)
        return size

    def _write(self, line: dict[str, Any]) -> None:
        with self.evaluation.writing():
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    def add(self, key: str, answer: Any) -> None:
        """Keep an answer; a power loss may take the last ones, a kill of the process does not."""
        if key not in self.known:
            self.known[key] = answer
            self._write({"key": key, "answer": answer})

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        # An answer that could not be written has already been reported.
        with contextlib.suppress(OSError):
            self.file.close()


def remove_answers(evaluation: Evaluation) -> None:
    """Delete a task's answers once its result is written."""
    evaluation.answers.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        evaluation.answers.parent.rmdir()
