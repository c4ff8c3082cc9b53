"""One process or many: the identity of this process, and what all of them do together."""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import functools
import os
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=1)
"""How long processes wait while one of them works on files; packing a corpus takes hours."""

CONNECT = datetime.timedelta(minutes=3)
"""How long processes wait for each other at the start."""

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "Timed out")
"""Parts of torch's messages when another process has disappeared."""


class ElsewhereError(ValueError):
    """Raised on the other processes when the first one failed; the first one reports the cause."""


@final
@dataclasses.dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int
    size: int
    device: torch.device
    waiting: dist.ProcessGroup | None = None
    """A separate group to wait in, since the group that computes should give up after minutes."""

    @property
    def first(self) -> bool:
        """Whether this process does what only one may do, such as writing logs and showing progress."""
        return self.rank == 0

    def rows(self, batch_size: int) -> slice:
        """This process's rows of a global batch."""
        if batch_size % self.size:
            raise ValueError(
                f"train.batch_size ({batch_size}) must be a multiple of the number of processes ({self.size})"
            )
        share = batch_size // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Whether it is true on any process; the hosts ask each other without waiting for a device."""
        if self.size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, group=self.waiting)
        return bool(flags)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.waiting)
        return values

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier(self.waiting)

    def first_does(self, action: Callable[[], T]) -> T | None:
        """The result of `action` on the first process; the others wait for it, and fail if it fails."""
        result, error = None, None
        if self.first:
            try:
                result = action()
            except Exception as raised:
                error = raised
        if self.size > 1:
            said = [None if error is None else str(error)]
            dist.broadcast_object_list(said, src=0, group=self.waiting)
            if said[0] is not None and not self.first:
                raise ElsewhereError(said[0])
        if error is not None:
            raise error
        return result

    def all_do(self, action: Callable[[], T]) -> T:
        """The result of `action` on this process. If it fails on any, all fail, and the first of those reports it."""
        result, error = None, None
        try:
            result = action()
        except Exception as raised:
            error = raised
        said = self.gather(None if error is None or isinstance(error, ElsewhereError) else str(error))
        speaker = next((rank for rank, text in enumerate(said) if text is not None), None)
        if error is not None and speaker in (None, self.rank):
            raise error
        if speaker is not None:
            raise ElsewhereError(said[speaker])
        return cast(T, result)


def is_lost(error: Exception, world: World) -> bool:
    """Whether an error means that another process has disappeared."""
    return world.size > 1 and isinstance(error, RuntimeError) and any(text in str(error) for text in LOST)


def gone(world: World, out: Any) -> ValueError:
    """The error to raise when another process has disappeared; one of the remaining processes reports it."""
    said = f"one of {world.size} processes has disappeared, so all stop; the same command with --resume continues {out}"
    try:
        # torchrun keeps the store alive, whichever process is lost.
        first = dist.distributed_c10d._get_default_store().add("gone", 1) == 1
    except (RuntimeError, ValueError):
        first = True
    return ValueError(said) if first else ElsewhereError(said)


def start() -> World:
    """Join the processes `torchrun` started, or be the only one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if size == 1:
        return World(0, 1, torch.device("cuda" if cuda else "cpu"))
    if cuda:
        # Launchers other than torchrun may not set LOCAL_RANK.
        gpus = torch.cuda.device_count()
        local = int(os.environ.get("LOCAL_RANK", int(os.environ.get("RANK", "0")) % gpus))
        if local >= gpus:
            raise ValueError(f"process {local + 1} of this node has no GPU; start at most {gpus} processes per node")
        torch.cuda.set_device(local)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if not dist.is_initialized():
        # The group is kept for the next training of this process: a new one would find the old one's keys in the store.
        _connect("nccl" if cuda else "gloo", size)
        atexit.register(_leave)
    return World(dist.get_rank(), dist.get_world_size(), device, _waiting_group())


def _connect(backend: str, size: int) -> None:
    began = time.monotonic()
    try:
        store, rank, _ = next(rendezvous("env://", timeout=CONNECT))
        store.set_timeout(CONNECT)
        dist.init_process_group(backend, store=_renew(store, rank, size), rank=rank, world_size=size, timeout=CONNECT)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{size} processes did not find each other in {time.monotonic() - began:.0f} s "
            f"({str(error).splitlines()[0].rstrip('.')}); start all of them again, with --resume"
        ) from error
    # What they do together later may take longer.
    usual = {"nccl": default_pg_nccl_timeout, "gloo": default_pg_timeout}[backend]
    dist.distributed_c10d._set_pg_timeout(usual or default_pg_timeout, dist.group.WORLD)


def _renew(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of the store that no processes of before have written to.

    After a restart torchrun gives the new processes the store of the old ones, whose addresses are still in it. A
    process that read one of those would wait in vain. So each says who it is under a new name, the first says whom it
    has seen, until every other has found itself among them and agreed.
    """
    mine, until = uuid.uuid4().hex, time.monotonic() + CONNECT.total_seconds()
    store.set(f"looptim/here/{rank}", mine)
    while time.monotonic() < until:
        if rank == 0:
            here = [name.decode() for name in store.multi_get([f"looptim/here/{each}" for each in range(size)])]
            store.set("looptim/seen", ",".join(here))
            done = store.check([f"looptim/{mine}/{name}" for name in here[1:]])
        else:
            here = store.get("looptim/seen").decode().split(",")
            done = mine in here
            if done:
                store.set(f"looptim/{here[0]}/{mine}", "agreed")
        if done:
            return dist.PrefixStore(here[0], store)
        time.sleep(0.05)
    raise RuntimeError("some of them have not come")


@functools.cache
def _waiting_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
