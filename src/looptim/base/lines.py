"""A JSON Lines file whose records have a `step`: appended to during a run, readable after any kill."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from .files import os_errors_as, write_whole


@final
class Lines:
    """The file. `check` returns a record, or raises a ValueError that says how it breaks the schema."""

    def __init__(self, path: Path, check: Callable[[Any], dict[str, Any]]):
        self.path, self.check = path, check

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        self.check(record)
        with os_errors_as(f"cannot write to {self.path}", "the last checkpoint is kept"), self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def keep(self, until: int) -> None:
        """Drop records after step `until`, from which a run resumes, and lines that cannot be read.

        A run that restarts at step 0 logs everything again, including the validation before its first update.
        """
        kept = [record for record in self._readable() if until and record["step"] <= until]
        with os_errors_as(f"cannot write to {self.path}", "free some space or get write access"):
            write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept))

    def last(self, key: str) -> dict[str, Any]:
        """The last record that has `key`, or an empty one. The run may still be writing."""
        return next((record for record in reversed(self._readable(tail=20_000)) if key in record), {})

    def read(self) -> list[dict[str, Any]]:
        """All records, merged into one per step. A step that goes back marks a resumed run, whose new records win."""
        records: dict[int, dict[str, Any]] = {}
        last = -1
        for number, text in enumerate(self._lines(), 1):
            if not text.strip():
                continue
            try:
                record = self.check(json.loads(text))
            except (ValueError, RecursionError) as error:
                short = repr(text[:60].decode(errors="replace")) + ("..." if len(text) > 60 else "")
                wrong = "it is not JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else error
                raise ValueError(
                    f"{self.path} line {number}: {wrong}, got {short}; repair or remove the line"
                ) from None
            step = record["step"]
            if step < last:
                records = {earlier: line for earlier, line in records.items() if earlier < step}
            records[step] = {**records.get(step, {}), **record}
            last = step
        return list(records.values())

    def _readable(self, tail: int | None = None) -> list[dict[str, Any]]:
        records = []
        for text in self._lines(tail):
            with suppress(ValueError, RecursionError):
                records.append(self.check(json.loads(text)))
        return records

    def _lines(self, tail: int | None = None) -> list[bytes]:
        """The complete lines in the last `tail` bytes; a kill or a running writer may leave the last line cut off."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail) if tail else 0)
            return file.read().split(b"\n")[:-1]
