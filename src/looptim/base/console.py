"""What a command prints: progress on a terminal, plain lines elsewhere, tables, and JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, final

EVERY = 30.0
"""Seconds between two progress lines where there is no terminal."""


@final
class Progress:
    """Progress of long work on standard error: a bar on a terminal, a plain line now and then elsewhere.

    `total` is None if it is unknown. `batch` is how much work gets done at a time.
    """

    def __init__(self, title: str, total: float | None = None, *, done: float = 0, batch: int = 0, show: bool = True):
        self.title, self.total, self.batch, self.show = title, total, batch, show
        self.done = self.before = done
        # The stream is looked up now, because evaluation silences libraries by replacing sys.stderr.
        self.stream = sys.stderr
        self.start = self.shown = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if self.show and self.stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            # The bar must not capture standard output, which carries the command's answer.
            console = Console(file=self.stream, markup=False, highlight=False)
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20))
            self.bar = Bar(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
            self.task = self.bar.add_task(self.title, total=self.total, completed=self.done)
            self.bar.start()
        else:
            self.say(self.title)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def expect(self, more: float, done: float = 0) -> None:
        """Add `more` work to the total, of which `done` is already done."""
        self.total = (self.total or 0) + more
        self.done += done
        self.before += done

    def advance(self, amount: float = 1, text: str = "", *, left: float | None = None, now: bool = False) -> None:
        """Count work, and show it if it is time to, or `now`. `left` is the seconds left, if the caller knows them."""
        self.done += amount
        moment = time.monotonic()
        if not self.show or (self.bar is None and not now and moment - self.shown < EVERY):
            return
        self.shown = moment
        # The results of a batch arrive one by one, but only after the time of the whole batch.
        fresh = max(self.batch, self.done - self.before)
        if left is None and self.total and fresh:
            left = (self.total - self.done) * (moment - self.start) / min(fresh, self.total - self.before)
        time_text = f"{duration(moment - self.start)} so far" if left is None else f"{duration(left)} left"
        percent = f"{min(1.0, self.done / self.total):.0%}" if self.total else ""
        line = f"{self.title}: {', '.join(part for part in (percent, text, time_text) if part)}"
        if self.bar is None:
            self.say(line)
        else:
            self.bar.update(self.task, description=line, completed=self.done, total=self.total)

    def say(self, text: str) -> None:
        """Print a separate line above the bar."""
        if self.bar is not None:
            self.bar.console.print(text, soft_wrap=True)
        elif self.show:
            print(text, file=self.stream, flush=True)


def clean(text: str) -> str:
    """Make a text one line that cannot control the terminal; names of files and folders may come from anybody.

    >>> clean("a\\x1b[2J\\nb")
    'a [2J b'
    """
    return "".join(letter if letter.isprintable() else " " for letter in text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out. On a CPU torch raises a plain RuntimeError for that.

    Sizes that no number of torch holds are more than there is, too.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    >>> is_out_of_memory(RuntimeError("Storage size calculation overflowed with sizes=[99999999999, 3199999999968]"))
    True
    """
    said = f"{type(error).__name__}: {error}"
    words = ("MemoryError", "DefaultCPUAllocator", "out of memory", "size calculation overflow", "Overflow when")
    return any(word in said for word in words)


def duration(seconds: float) -> str:
    """
    >>> duration(59.7), duration(61), duration(7260)
    ('1:00', '1:01', '2:01:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def print_json(value: Any) -> None:
    """Print a value on standard output for another program."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output; numbers are right-aligned if there are few columns."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width, so cells are not folded there.
    console = Console(width=None if sys.stdout.isatty() else 220, markup=False, highlight=False)
    table = Table(box=SIMPLE_HEAD)
    for index, name in enumerate(header):
        numeric = bool(rows) and all(row[index][:1].isdigit() or not row[index] for row in rows)
        table.add_column(name, overflow="fold", justify="right" if numeric and len(header) < 6 else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
