"""Several processes that open the same data together, each doing its share of reading and tokenizing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, final

from ..base.files import aside_name, scratch_folder, whole_folder

T = TypeVar("T")


class Crew(Protocol):
    """This process among those that open the data."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in order."""
        ...

    def first_does(self, action: Callable[[], T]) -> T | None:
        """The result of `action` on the first process; the others wait for it, and fail if it fails."""
        ...

    def all_do(self, action: Callable[[], T]) -> T:
        """The result of `action` on this process; if it fails on any process, all fail."""
        ...


@final
class Alone(NamedTuple):
    """A single process.

    >>> Alone().gather(3)
    [3]
    """

    rank: int = 0
    size: int = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def first_does(self, action: Callable[[], T]) -> T | None:
        return action()

    def all_do(self, action: Callable[[], T]) -> T:
        return action()


ALONE = Alone()


@contextmanager
def shared_folder(path: Path, crew: Crew, *, keep: bool) -> Iterator[Path]:
    """A folder that all processes write into; at the end it becomes `path`, or is deleted if it is not to be kept."""
    # The first process chooses the name, so that other nodes do not mistake it for a leftover of a killed process.
    aside = crew.gather(aside_name(path))[0]
    make = whole_folder if keep else scratch_folder
    with ExitStack() as held:
        crew.first_does(lambda: held.enter_context(make(path, aside=aside)))
        yield aside
        crew.first_does(held.pop_all().close)
