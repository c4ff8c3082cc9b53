"""A progress bar on a terminal, one plain line elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
