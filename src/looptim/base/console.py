"""What a command shows: progress on a terminal, plain lines elsewhere, and tables."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, final

EVERY = {True: 0.2, False: 30.0}
"""Seconds between two looks at the progress, on a terminal and elsewhere."""
WIDTH = 20
"""Characters of the bar."""


@final
class Progress:
    """How far long work is: a bar on a terminal, a plain line now and then elsewhere, both on standard error.

    `total` is None where nobody knows it. `batch` is how much gets done at a time.
    """

    def __init__(self, title: str, total: float | None = None, *, done: float = 0, batch: int = 0, show: bool = True):
        self.title, self.total, self.batch, self.show = title, total, batch, show
        self.done = self.before = done
        # The stream there is now: evaluation silences libraries by replacing sys.stderr.
        self.stream = sys.stderr
        self.terminal = self.stream.isatty()
        self.start = self.shown = time.monotonic()

    def __enter__(self) -> Progress:
        if not self.terminal:
            self.say(self.title)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.terminal:
            self._print("", end="")

    def expect(self, more: float, done: float = 0) -> None:
        """There is `more` to do, of which `done` was done before."""
        self.total = (self.total or 0) + more
        self.done += done
        self.before += done

    def advance(self, amount: float = 1, text: str = "", *, left: float | None = None, now: bool = False) -> None:
        """Count what was done and show it if it is time to, or `now`; `left` seconds, if the caller knows them."""
        self.done += amount
        moment = time.monotonic()
        if not now and moment - self.shown < EVERY[self.terminal]:
            return
        self.shown = moment
        # The results of a batch come one by one after the time of all.
        fresh = max(self.batch, self.done - self.before)
        if left is None and self.total and fresh:
            left = (self.total - self.done) * (moment - self.start) / min(fresh, self.total - self.before)
        elapsed = f"{duration(moment - self.start)} so far"
        self._show([text, elapsed if left is None else f"{duration(left)} left"])

    def _show(self, said: list[str]) -> None:
        share = min(1.0, self.done / self.total) if self.total else None
        percent = "" if share is None else f"{share:.0%}"
        line = f"{self.title}: {', '.join(part for part in (percent, *said) if part)}"
        if self.terminal:
            bar = "" if share is None else f"[{'#' * int(share * WIDTH):.<{WIDTH}}] "
            self._print(f"{bar}{line}"[: shutil.get_terminal_size().columns - 1], end="")
        else:
            self.say(line)

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        self._print(text, end="\n")

    def _print(self, text: str, end: str) -> None:
        if self.show:
            # What stood in the line before, a longer bar say, is erased.
            print(f"\r\x1b[K{text}" if self.terminal else text, end=end, file=self.stream, flush=True)


def duration(seconds: float) -> str:
    """
    >>> duration(59.7), duration(61), duration(7260)
    ('1:00', '1:01', '2:01:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output, numbers to the right where there are few columns."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width: the cells of a table that no terminal limits are not folded.
    console = Console(width=None if sys.stdout.isatty() else 220, markup=False, highlight=False)
    table = Table(box=SIMPLE_HEAD)
    for index, name in enumerate(header):
        numeric = bool(rows) and all(row[index][:1].isdigit() or not row[index] for row in rows)
        table.add_column(name, overflow="fold", justify="right" if numeric and len(header) < 6 else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
