"""Where experts live, and how rows come to them: what a mixture of experts must know of other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int


class Trip(Protocol):
    """The way of rows, sorted by expert, to where their experts live, and back."""

    @property
    def ends(self) -> Int[Tensor, " experts"]:
        """Where the rows of each expert that lives here end, among those that came."""
        ...

    def there(self, rows: Tensor) -> Tensor: ...

    def back(self, rows: Tensor) -> Tensor: ...


class Exchange(Protocol):
    """Which experts live here, and how rows come to those that do not."""

    @property
    def num_experts(self) -> int:
        """How many there are, here and elsewhere."""
        ...

    def own(self, weight: Tensor) -> Tensor:
        """The matrices of the experts that live here."""
        ...

    def trip(self, ends: Int[Tensor, " experts"]) -> Trip:
        """The trip of this process's rows, sorted by expert, of which those of each of all experts end at `ends`."""
        ...


@final
class Stay(NamedTuple):
    """The trip of rows whose experts are all here."""

    ends: Tensor

    def there(self, rows: Tensor) -> Tensor:
        return rows

    def back(self, rows: Tensor) -> Tensor:
        return rows
