"""The exchange protocol: where experts live, and how rows travel to them and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int


class Trip(Protocol):
    """The trip of rows, sorted by expert, to where their experts live, and back."""

    @property
    def ends(self) -> Int[Tensor, " experts"]:
        """The index after the last row of each expert that lives here, among the rows that arrived."""
        ...

    def there(self, rows: Tensor) -> Tensor: ...

    def back(self, rows: Tensor) -> Tensor: ...


class Exchange(Protocol):
    """Which experts live here, and how rows travel to the others."""

    @property
    def num_experts(self) -> int:
        """The number of experts, here and elsewhere."""
        ...

    def own(self, weight: Tensor) -> Tensor:
        """The matrices of the experts that live here."""
        ...

    def trip(self, ends: Int[Tensor, " experts"]) -> Trip:
        """The trip of this process's rows, sorted by expert; the rows of expert i end at `ends[i]`."""
        ...


@final
class Stay(NamedTuple):
    """The trip of rows whose experts all live here."""

    ends: Tensor

    def there(self, rows: Tensor) -> Tensor:
        return rows

    def back(self, rows: Tensor) -> Tensor:
        return rows
