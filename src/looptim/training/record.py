"""What an update does to memory and to the network, seen operation by operation, on real or fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "alltoall_": "all-to-all",
    "shard_dim_alltoall": "all-to-all",
    "allgather_": "all-gather",
}
"""Collectives by the names of their operators, eager and functional."""


class Collective(NamedTuple):
    """A collective operation, with the bytes of the larger of a process's input and output."""

    phase: str
    kind: str
    bytes: int
    ranks: tuple[int, ...]
    module: str = ""
    """Whose parameters it moves, where FSDP says so."""

    @property
    def received(self) -> float:
        """The bytes that arrive from other processes in a ring."""
        share = (len(self.ranks) - 1) / len(self.ranks)
        return self.bytes * share * (2 if self.kind == "all-reduce" else 1)


@final
class Recorder(TorchDispatchMode):
    """Tracks live storage by its purpose, and lists all collectives.

    >>> with Recorder() as seen:
    ...     x = torch.ones(4, 4)
    ...     y = (x + 1).sum()
    >>> seen.peak["activations"], len(seen.collectives)
    (132, 0)
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "activations"
        self.collectives: list[Collective] = []
        self.flops: Counter[str] = Counter()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.paused = False
        self._scopes: list[str] = []
        self._known: dict[int, tuple[str, int]] = {}
        self._resized: dict[int, weakref.ref[UntypedStorage]] = {}
        self._references: dict[int, weakref.ref[UntypedStorage]] = {}

    def hold(self, what: str, tensors: Any) -> None:
        """Count tensors that already exist."""
        for tensor in tensors:
            self._see(tensor.to_local() if isinstance(tensor, DTensor) else tensor, what)
        self._mark()

    def __enter__(self) -> Recorder:
        super().__enter__()
        self._propagate = propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        recorder = self

        def unseen(self: ShardingPropagator, op_schema: Any) -> Any:
            recorder.paused = True
            try:
                return propagate(self, op_schema)
            finally:
                recorder.paused = False

        # DTensors infer shapes from whole tensors that have no memory anywhere.
        ShardingPropagator._propagate_tensor_meta_non_cached = unseen
        return self

    def __exit__(self, *error: Any) -> None:
        ShardingPropagator._propagate_tensor_meta_non_cached = self._propagate
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Half of all that arrives here is this question.
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            fake = args[0]
            return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device
        if self.paused:
            return func(*args, **(kwargs or {}))
        # Their local parts come through here again, one by one.
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace == "profiler":
            self._scope(func.overloadpacket.__name__, args)
            return out
        phase = "gradients" if self.phase == "activations" and _in_backward() else self.phase
        packet = func.overloadpacket
        if packet in flop_registry:
            self.flops[phase] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        moves = func.namespace in ("c10d", "_c10d_functional", "_dtensor", "fsdp")
        if moves:
            self._collective(packet.__name__, phase, args, out)
        for tensor in tree_leaves((args, kwargs, out) if moves else out):
            if isinstance(tensor, Tensor):
                self._see(tensor, "gathered" if moves else phase)
                if moves:
                    self._resized[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())
        self._mark()
        return out

    def _scope(self, name: str, args: Any) -> None:
        if name == "_record_function_enter_new":
            self._scopes.append(args[0])
        elif self._scopes:
            self._scopes.pop()

    def _collective(self, name: str, phase: str, args: Any, out: Any) -> None:
        if name not in KINDS:
            return
        size = max((_nbytes(side) for side in (*args, out)), default=0)
        self.collectives.append(Collective(phase, KINDS[name], size, _ranks(args), _module(self._scopes)))

    def _see(self, tensor: Tensor, what: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            if what == "gathered" and self._known[key][0] not in ("parameters", "optimizer"):
                self._count(key, what, storage.nbytes())
            return
        self._count(key, what, storage.nbytes())
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _count(self, key: int, what: str, size: int) -> None:
        before, old = self._known.get(key, (what, 0))
        self.live[before] -= old
        self.live[what] += size
        self._known[key] = (what, size)

    def _forget(self, key: int) -> None:
        what, size = self._known.pop(key)
        self.live[what] -= size
        self._references.pop(key, None)
        self._resized.pop(key, None)

    def _mark(self) -> None:
        """Record a new peak. FSDP resizes storage without any operation, so it is checked first."""
        if self.live.total() <= self.peak.total():
            return
        for key, reference in list(self._resized.items()):
            storage = reference()
            if storage is not None and key in self._known:
                self._count(key, self._known[key][0], storage.nbytes())
        if self.live.total() > self.peak.total():
            self.peak = Counter(self.live)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _module(scopes: Iterable[str]) -> str:
    """Of scopes such as "FSDP::all_gather (blocks.3)" the module."""
    names = [scope.partition("(")[2].rstrip(")") for scope in scopes if scope.startswith("FSDP::")]
    return next(filter(None, names), "")


def _nbytes(side: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(side) if isinstance(t, Tensor))


def _ranks(args: Any) -> tuple[int, ...]:
    """The processes of a collective; its group is boxed or named among the arguments."""
    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(arg))
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
        if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min"):
            name = dist.distributed_c10d.GroupName(arg)
            return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name)))
    raise AssertionError("a collective without a group")
