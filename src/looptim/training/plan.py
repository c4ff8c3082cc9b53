"""What a training would cost on GPUs that are not here: an update is run with fake tensors, for every kind of mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, cast, final

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import placement_types
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..base import numerics
from ..config import Config, ParallelConfig, Strict
from ..data import Batch
from ..loop import kernels
from ..model import Experts, LoopedLM, attention
from ..model.count import training_flops
from .distributed import World
from .exchange import AllToAll
from .mesh import Sizes, build, hold_gradients, open_mesh
from .optim import MuonAdamW, clip_gradients, parameter_groups
from .record import Collective, Recorder
from .step import TrainingState, accumulate

STEP = "optimizer step"
PARTS = ("parameters", "optimizer", "gathered", "gradients", "activations", STEP)


class Gpu(Strict):
    """The assumptions about the machines; the defaults describe an H100 with 80 GB and a network card of its own."""

    memory: float = 80.0
    """GB, of which `reserve` goes to the CUDA context, to NCCL and to fragments."""
    reserve: float = 6.0
    bf16: float = 989.0
    """TFLOP/s, as is fp32."""
    fp32: float = 67.0
    utilization: float = 0.35
    """The share of the peak speed that a step reaches."""
    inside: float = 450.0
    """GB/s that a GPU receives from its own node, and between: through its network card."""
    between: float = 50.0


@final
@dataclasses.dataclass(frozen=True)
class Cluster:
    """GPUs on nodes."""

    gpus: int
    nodes: int
    gpu: Gpu

    def spans(self, ranks: Iterable[int]) -> int:
        """The number of nodes that some processes are on."""
        return len({rank // (self.gpus // self.nodes) for rank in ranks})

    def through_card(self, collective: Collective) -> float:
        """Bytes a GPU's card receives where rings enter a node once, over the cards of all its processes."""
        processes, nodes = len(collective.ranks), self.spans(collective.ranks)
        here = processes / nodes
        if collective.kind == "all-to-all":
            return collective.bytes * (processes - here) / processes
        times = 2 if collective.kind == "all-reduce" else 1
        return times * collective.bytes * (nodes - 1) / nodes / here

    def seconds(self, collective: Collective) -> float:
        """The time of the slower of the two links."""
        return max(collective.received / self.gpu.inside / 1e9, self.through_card(collective) / self.gpu.between / 1e9)


def plan(config: Config, *, gpus: int, nodes: int = 1, gpu: Gpu | None = None) -> dict[str, Any]:
    """Memory, traffic and time of an update on a GPU, for every kind of mesh, and which one to take.

    The model, the optimizer and the mesh are built with fake tensors on a fake process group of that size, and one
    update is run: memory and collectives are PyTorch's, times are arithmetic on what `gpu` assumes. Loads of experts
    are balanced, and a sequence is one document.
    """
    if gpus < 1 or nodes < 1 or gpus % nodes:
        raise ValueError(f"--gpus {gpus} must be a multiple of --nodes {nodes}, and both at least 1")
    cluster = Cluster(gpus, nodes, gpu or Gpu())
    found = [_examine(_on(config, mesh), cluster) for mesh in candidates(config, gpus, nodes)]
    fitting = [each for each in found if each["fits"]]
    best = None
    if fitting:
        fastest = min(each["seconds"]["total"] for each in fitting)
        # Among meshes that are as fast as the fastest, take the one with the least traffic between nodes.
        close = [each for each in fitting if each["seconds"]["total"] <= 1.05 * fastest]
        best = min(close, key=lambda each: each["bytes_between_nodes"])
    return {
        "model": f"{config.model.layout} {config.model.loop.preset}",
        "gpus": gpus,
        "nodes": nodes,
        "assumed": cluster.gpu.model_dump(),
        "loads": "balanced",
        "meshes": found,
        "recommended": None if best is None else best["mesh"],
        "change": None if fitting else _smallest_change(config, cluster, found),
    }


def candidates(config: Config, gpus: int, nodes: int) -> list[ParallelConfig]:
    """FSDP over everything, one copy per node, and both with the experts of a layer spread over a node."""
    routed = config.model.dense_layers < sum(segment.blocks for segment in config.model.segments)
    # The largest number of ways in which a node can split the experts evenly.
    spread = max(n for n in range(1, gpus // nodes + 1) if gpus // nodes % n == 0 and config.model.experts % n == 0)
    return [
        ParallelConfig(replicate=replicate, expert=expert)
        for replicate in dict.fromkeys((1, nodes))
        for expert in dict.fromkeys((1, spread if routed else 1))
    ]


def _on(config: Config, mesh: ParallelConfig) -> Config:
    """The recipe on a mesh, with its average number of loops."""
    loops, model = config.train.loops, config.model
    if loops.scheme != "fixed":
        model = model.with_loops(max(1, round(loops.mean + (loops.scheme == "huginn"))))
    train = config.train.model_copy(update={"loops": type(loops)()})
    return config.model_copy(update={"parallel": mesh, "model": model, "train": train})


def _examine(config: Config, cluster: Cluster) -> dict[str, Any]:
    """One mesh."""
    with fake_processes(cluster.gpus) as world, _as_on_gpus():
        mesh = open_mesh(config.parallel, world)
        with FakeTensorMode():
            model = build(config, world, mesh)
            do_without_values(model, config, world)
            seen = rehearse_once(config, world, model)
    sizes = Sizes.of(config.parallel, cluster.gpus)
    peak = seen.peak.total() / 1e9
    between = [c for c in seen.collectives if cluster.spans(c.ranks) > 1]
    return {
        "mesh": dataclasses.asdict(sizes),
        "memory_gb": {part: round(seen.peak[part] / 1e9, 6) for part in PARTS} | {"peak": round(peak, 6)},
        "fits": peak + cluster.gpu.reserve <= cluster.gpu.memory,
        "collectives": _table(seen.collectives, cluster),
        "bytes_between_nodes": round(sum(c.received for c in between)),
        "bytes_between_nodes_by_module": _by_module(between),
        "bytes_through_card": round(sum(cluster.through_card(c) for c in between)),
        "seconds": _seconds(config, cluster, seen),
    }


def _table(collectives: Iterable[Collective], cluster: Cluster) -> list[dict[str, Any]]:
    """Merge collectives of the same kind."""
    counts: Counter[tuple] = Counter()
    received: dict[tuple, float] = {}
    for c in collectives:
        link = "between nodes" if cluster.spans(c.ranks) > 1 else "inside a node"
        key = ("forward and backward" if c.phase != STEP else STEP, c.kind, len(c.ranks), link)
        counts[key] += 1
        received[key] = received.get(key, 0.0) + c.received
    names = ("phase", "kind", "processes", "link")
    return [
        {**dict(zip(names, key, strict=True)), "count": counts[key], "bytes": round(received[key])} for key in counts
    ]


def _by_module(collectives: Iterable[Collective]) -> dict[str, int]:
    """What moves for each block in forward and backward, and for all of them in the optimizer."""
    received: dict[str, float] = {}
    for c in collectives:
        # FSDP names all modules that it gathers at a time.
        name = STEP if c.phase == STEP else ".".join(re.split(r"[.,]", c.module)[:2]) or "other"
        received[name] = received.get(name, 0.0) + c.received
    return {name: round(size) for name, size in received.items()}


def _seconds(config: Config, cluster: Cluster, seen: Recorder) -> dict[str, float]:
    """The time of an update. Gathering overlaps with computing; traveling tokens and the optimizer do not."""
    gpu, train = cluster.gpu, config.train
    peak = (gpu.bf16 if train.dtype == "bf16" else gpu.fp32) * 1e12 * gpu.utilization
    tokens = train.batch_size * train.seq_len / cluster.gpus
    # Recomputation adds a forward pass, a third of forward and backward together.
    compute = training_flops(config) * tokens / peak * (4 / 3 if train.activation_checkpointing else 1)
    hidden = sum(cluster.seconds(c) for c in seen.collectives if c.phase != STEP and c.kind != "all-to-all")
    travel = sum(cluster.seconds(c) for c in seen.collectives if c.phase != STEP and c.kind == "all-to-all")
    step = sum(cluster.seconds(c) for c in seen.collectives if c.phase == STEP)
    step += seen.flops[STEP] / (gpu.fp32 * 1e12 * gpu.utilization)
    seconds = {"compute": compute, "gathering": hidden, "tokens that travel": travel, "optimizer": step}
    return {k: round(v, 4) for k, v in (seconds | {"total": max(compute, hidden) + travel + step}).items()}


def _smallest_change(config: Config, cluster: Cluster, found: list[dict[str, Any]]) -> str:
    """The first of the usual memory savings that makes the smallest mesh fit."""
    mesh = ParallelConfig(**min(found, key=lambda each: each["memory_gb"]["peak"])["mesh"])
    changes: dict[str, Any] = {}
    rows = config.train.micro_batch or config.train.batch_size // cluster.gpus
    ways: list[tuple[str, Any]] = [] if config.train.activation_checkpointing else [("activation_checkpointing", True)]
    while rows > 1:
        rows //= 2
        ways.append(("micro_batch", rows))
    for key, value in ways:
        changes[key] = value
        smaller = config.model_copy(update={"train": config.train.model_copy(update=changes)})
        if _examine(_on(smaller, mesh), cluster)["fits"]:
            sides = f"parallel.replicate={mesh.replicate} parallel.expert={mesh.expert}"
            return f"{' '.join(f'train.{k}={str(v).lower()}' for k, v in changes.items())} {sides}"
    return "more GPUs, since even one sequence at a time does not fit"


@contextlib.contextmanager
def fake_processes(size: int) -> Iterator[World]:
    """Pretend to be the first of this many processes."""
    if dist.is_initialized():
        raise ValueError("a plan cannot be made by one of several processes; start it alone, without torchrun")
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield World(0, size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _as_on_gpus() -> Iterator[None]:
    """Take the ways of GPUs where those of CPUs differ; each module knows its own way by one name."""

    def exchange(x: Tensor, gather_dim: int, shard_dim: int, mesh: Any, side: int) -> Tensor:
        return torch.ops._dtensor.shard_dim_alltoall(x, gather_dim, shard_dim, mesh.get_group(side).group_name)

    def attend(q: Tensor, k: Tensor, v: Tensor, *window: int | None, **masks: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    ways: list[tuple[Any, str, Any]] = [
        # Gloo has no all-to-all of DTensors, so they would gather everything.
        (placement_types, "shard_dim_alltoall", exchange),
        # A GPU does not cut stacks of matrices, and states, into parts that fit a cache.
        (numerics, "CACHED_NUMEL", sys.maxsize),
        (kernels, "CHUNK_NUMEL", sys.maxsize),
        # FlexAttention keeps what causal attention keeps: its inputs, its output and a number per query.
        (attention, "blocked_window_attention", attend),
        (attention, "attention_by_document", attend),
    ]
    before = [getattr(module, name) for module, name, _ in ways]
    for module, name, way in ways:
        setattr(module, name, way)
    try:
        yield
    finally:
        for (module, name, _), way in zip(ways, before, strict=True):
            setattr(module, name, way)


def do_without_values(model: LoopedLM, config: Config, world: World) -> None:
    """Skip the check of fake tokens, which are in no vocabulary, and take fake loads to be balanced."""
    model.check_vocabulary = lambda tokens: None
    share = config.train.batch_size // world.size
    rows = config.train.micro_batch or share
    if share % rows:
        raise ValueError(f"a plan needs train.micro_batch ({rows}) to divide the {share} sequences of a process")
    pairs = rows * config.train.seq_len * config.model.top_k
    for module in model.modules():
        if isinstance(module, Experts) and isinstance(module.exchange, AllToAll):
            processes = module.exchange.group.size()
            even = [(pairs + i) // processes for i in range(processes)]
            module.exchange = dataclasses.replace(module.exchange, read=lambda sent, got, even=even: (even, even))


def rehearse(config: Config, world: World, model: LoopedLM) -> Recorder:
    """Run one update on a batch of zeros, and tell what it did."""
    return _rehearse(config, world, model, rows=config.train.batch_size // world.size)


def rehearse_once(config: Config, world: World, model: LoopedLM) -> Recorder:
    """The same from the last micro-batch alone, with the gradients of those before it already there.

    They differ from it in nothing but that their gradients are not reduced. So a plan does not take longer where there
    are more of them.
    """
    share = config.train.batch_size // world.size
    rows = config.train.micro_batch or share
    seen = _rehearse(config, world, model, rows=rows)
    # The first collective of an update counts the targets of the whole batch.
    first, rest = seen.collectives[:1], seen.collectives[1:]
    before = [c for c in rest if c.phase != STEP and c.kind in ("all-gather", "all-to-all")]
    seen.collectives = [*first, *before * (share // rows - 1), *rest]
    return seen


def _rehearse(config: Config, world: World, model: LoopedLM, *, rows: int) -> Recorder:
    """Run an update on so many rows of this process's share of a batch; of the others' gradients there is memory."""
    train = config.train
    # What a reversible loop keeps depends on numbers that a plan does not have, so it is planned as keeping everything.
    model.checkpointing = train.activation_checkpointing
    optimizer = MuonAdamW(parameter_groups(model, lr=config.optim.lr, weight_decay=config.optim.weight_decay))
    optimizer.prepare()
    share = train.batch_size // world.size
    tokens = torch.zeros(share, train.seq_len, dtype=torch.long)
    run = TrainingState(config, cast(Any, None), world, cast(Any, None), model, optimizer)
    seen = Recorder()
    seen.hold("parameters", [*model.parameters(), *model.buffers()])
    seen.hold("optimizer", [tensor for state in optimizer.state.values() for tensor in state.values()])
    if rows < share:
        seen.hold("gradients", hold_gradients(model))
    with seen:
        accumulate(run, Batch(tokens[:rows], tokens[:rows], tokens[:rows]), 0)
        seen.phase = STEP
        norm = clip_gradients(model.parameters(), config.optim.clip)
        optimizer.step(skip=(~norm.isfinite()).float())
        optimizer.zero_grad()
    return seen
