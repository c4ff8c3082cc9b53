"""What a command shows while it works: progress on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import final

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

EVERY = {True: 0.2, False: 30.0}
"""Seconds between lines, on a terminal and elsewhere."""


@final
class Progress:
    """Counts the requests of a task and says when they will be done."""

    def __init__(self, title: str, *, batch: int = 1, quiet: bool = False):
        self.title = title
        self.batch = batch
        self.quiet = quiet
        # The one there is now: libraries are silenced by replacing it.
        self.stream = sys.stderr
        self.terminal = self.stream.isatty()
        self.start = self.shown = time.monotonic()
        self.total = self.done = self.first = 0

    def add(self, total: int, done: int = 0) -> None:
        """`total` requests more, of which `done` were answered before."""
        self.total += total
        self.done += done
        self.first += done

    def update(self, count: int = 1) -> None:
        """`count` requests have been answered."""
        self.done += count
        now = time.monotonic()
        if self.quiet or now - self.shown < EVERY[self.terminal]:
            return
        self.shown = now
        # The answers of a batch come one by one after the time of all.
        fresh = min(self.total - self.first, max(self.batch, self.done - self.first))
        left = (self.total - self.done) * (now - self.start) / fresh
        self._print(f"{self.title}: {self.done}/{self.total}, {duration(left)} left", "\r" if self.terminal else "\n")

    def end(self, text: str) -> None:
        """The last line."""
        if not self.quiet:
            self._print(f"{self.title}: {text}", "\n")

    def _print(self, text: str, end: str) -> None:
        # Over a longer line that was there before.
        print(f"{text}\x1b[K" if self.terminal else text, end=end, file=self.stream, flush=True)


def duration(seconds: float) -> str:
    """
    >>> duration(59.7), duration(61), duration(7260)
    ('1:00', '1:01', '2:01:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def bar(what: str, *, total: int | None, show: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of characters done; `total` is None where nobody knows it."""
    console = Console(stderr=True)
    if not show or not console.is_terminal:
        if show:
            console.print(what, highlight=False)
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with RichProgress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
