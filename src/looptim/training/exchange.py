"""The exchange of tokens between processes that share the experts of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single

from .optim.muon import local


def read_sizes(sent: Tensor, got: Tensor) -> tuple[list[int], list[int]]:
    """How many rows go to and come from each process, on the host: a trip's only wait for the device."""
    sizes = torch.stack([sent, got]).tolist()
    return sizes[0], sizes[1]


@final
@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Experts are spread over a group of processes; each process has an equal part of them, in order.

    No row is dropped, however uneven the loads are: the sizes of all parts are exchanged first, and are read once per
    trip.
    """

    group: dist.ProcessGroup
    num_experts: int
    read: Callable[[Tensor, Tensor], tuple[list[int], list[int]]] = read_sizes

    def own(self, weight: Tensor) -> Tensor:
        return local(weight)

    def trip(self, ends: Tensor) -> Travel:
        return prepare(self, ends)


# A compiler would generate new code for every set of loads.
@torch.compiler.disable
def prepare(exchange: AllToAll, ends: Tensor) -> Travel:
    """Tell every process how many rows for each of its experts come from here."""
    ranks = exchange.group.size()
    leaving = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1)
    coming = all_to_all_single(leaving.flatten(), None, None, exchange.group).view(ranks, -1)
    sent, got = exchange.read(leaving.sum(1), coming.sum(1))
    experts = torch.arange(coming.shape[1], device=ends.device, dtype=torch.int16).repeat(ranks)
    # Rows arrive sorted by process, then by expert; with the sizes given, nothing more is read from the device.
    experts = experts.repeat_interleave(coming.flatten(), output_size=sum(got))
    order = experts.argsort(stable=True)
    return Travel(exchange.group, coming.sum(0).cumsum(0, dtype=torch.int32), order, sent, got)


@torch.compiler.disable
def exchange_rows(rows: Tensor, coming: list[int], leaving: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the given numbers of rows to the processes and receive theirs; gradients travel back."""
    return all_to_all_single(rows.contiguous(), coming, leaving, group)


@final
@dataclasses.dataclass(frozen=True)
class Travel:
    """A trip to other processes."""

    group: dist.ProcessGroup
    ends: Tensor
    order: Tensor
    """The rows that arrived, sorted by expert."""
    sent: list[int]
    got: list[int]

    def there(self, rows: Tensor) -> Tensor:
        return exchange_rows(rows, self.got, self.sent, self.group).index_select(0, self.order)

    def back(self, rows: Tensor) -> Tensor:
        rows = torch.empty_like(rows).index_copy(0, self.order, rows)
        return exchange_rows(rows, self.sent, self.got, self.group)
