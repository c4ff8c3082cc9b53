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
        """What every process gives, in their order."""
        ...

    def first_does(self, action: Callable[[], T]) -> T | None:
        """What the first process gets from `action`, for which the others wait, and fail where it fails."""
        ...

    def all_do(self, action: Callable[[], T]) -> T:
        """What this process gets from `action`; where it fails on one of them, all fail."""
        ...


@final
class Alone(NamedTuple):
    """The only process.

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
    """A folder that all processes write into; in the end it becomes `path`, or is gone where it is not to be kept."""
    # A name of the first process, so that its like on other nodes do not take it for what a killed one left.
    aside = crew.gather(aside_name(path))[0]
    make = whole_folder if keep else scratch_folder
    with ExitStack() as held:
        crew.first_does(lambda: held.enter_context(make(path, aside=aside)))
        yield aside
        crew.first_does(held.pop_all().close)
