"""How far an evaluation is and when it will be done: a changing line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import final

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
