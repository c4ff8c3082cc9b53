"""How processes share a model: a mesh of copies, shards and experts, and FSDP2 on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..config import Config, ParallelConfig
from ..model import Block, Experts, Layout, LoopedLM, MoE, RMSNorm, Router
from .distributed import World
from .exchange import AllToAll


@final
@dataclasses.dataclass(frozen=True)
class Sizes:
    """The dimensions of a mesh: `replicate` copies of `shard` processes; each `expert` neighbors split the experts."""

    replicate: int
    shard: int
    expert: int

    @classmethod
    def of(cls, parallel: ParallelConfig, processes: int) -> Sizes:
        """The mesh that the recipe asks for with this many processes.

        >>> Sizes.of(ParallelConfig(replicate=2, expert=2), 8)
        Sizes(replicate=2, shard=4, expert=2)
        """
        replicate, expert = parallel.replicate, parallel.expert
        shard = processes // replicate if parallel.shard is None else parallel.shard
        if replicate * shard != processes:
            asked = f"parallel.replicate ({replicate})" + ("" if parallel.shard is None else f" x shard ({shard})")
            raise ValueError(f"{asked} does not multiply to {processes} processes; change it, or their number")
        if shard % expert:
            raise ValueError(
                f"parallel.expert ({expert}) must divide the {shard} processes that share a copy of the model "
                f"({processes} processes, parallel.replicate {replicate}); change one of them"
            )
        return cls(replicate, shard, expert)


class Mesh(NamedTuple):
    """The dimensions of a mesh as groups of processes."""

    whole: DeviceMesh
    """The mesh of everything but spread experts: each copy sharded over its processes."""
    expert: DeviceMesh | None
    """Neighbors that split the experts, so that tokens travel within a node; None if experts are gathered."""
    rest: DeviceMesh | None
    """The rest of a copy, which shards each share of the experts, and the other copies."""


def open_mesh(parallel: ParallelConfig, world: World) -> Mesh | None:
    """The mesh of all processes; None if there is only one."""
    sizes, device = Sizes.of(parallel, world.size), world.device.type
    if world.size == 1:
        return None
    sides = (sizes.shard,) if sizes.replicate == 1 else (sizes.replicate, sizes.shard)
    whole = init_device_mesh(device, sides, mesh_dim_names=("replicate", "shard")[-len(sides) :])
    if sizes.expert == 1:
        return Mesh(whole, None, None)
    sides = (sizes.replicate, sizes.shard // sizes.expert, sizes.expert)
    mesh = init_device_mesh(device, sides, mesh_dim_names=("replicate", "shard", "expert"))
    # With one group for both dimensions, torch sums the norm of gradients in a single reduction.
    mesh["shard", "expert"]._flatten("copy")
    return Mesh(whole, mesh["expert"], mesh["shard"] if sizes.replicate == 1 else mesh["replicate", "shard"])


def build(config: Config, world: World, mesh: Mesh | None) -> LoopedLM:
    """The model on this process's device, or this process's shard of it, sharded block by block as it is built.

    No process therefore holds more at once than its shard, a block or two, and what is outside blocks: embedding, head
    and loops. A looped block stays gathered after its forward pass; a plain one does not. In bf16 the matrices of
    blocks are rounded before they are gathered, as autocast would do afterwards; norms, routers, transitions, embedding
    and head are fp32.
    """
    visits = Layout.of(config.model).visits
    narrow = config.train.dtype == "bf16"

    def place(block: Block, index: int) -> None:
        _move(block, world.device)
        if mesh is None:
            return
        # A looped block is needed again at once.
        reshard = visits[index] == 1
        if isinstance(block.feedforward, MoE):
            _spread(block.feedforward.experts, mesh, reshard=reshard, narrow=narrow)
        if narrow:
            exact = [module for module in block.modules() if isinstance(module, RMSNorm | Router)]
            _shard(exact, mesh.whole, reshard=reshard)
        _shard([block], mesh.whole, reshard=reshard, narrow=narrow)

    model = LoopedLM(config.model, seed=config.train.seed, place=place)
    _move(model, world.device)
    if mesh is not None:
        _shard([model], mesh.whole)
        register_fsdp_forward_method(model, "loss")
    return model


def _move(module: nn.Module, device: torch.device) -> None:
    # Tensors already in place are kept; the fake tensors of a plan cannot be moved.
    if any(p.device.type != device.type for p in module.parameters()):
        module.to(device)


def _spread(experts: Experts, mesh: Mesh, *, reshard: bool, narrow: bool) -> None:
    """Give each process its experts, if the mesh spreads them, and shard those over the other dimensions."""
    if mesh.expert is None or mesh.rest is None:
        return
    experts.exchange = AllToAll(mesh.expert.get_group(), len(experts.gate))
    for name, parameter in list(experts.named_parameters()):
        # Every process has drawn all experts and keeps its own.
        mine = distribute_tensor(parameter.data, mesh.expert, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(mine))
    _shard([experts], mesh.rest, reshard=reshard, narrow=narrow)


def _shard(
    modules: Sequence[nn.Module], mesh: DeviceMesh, *, reshard: bool | None = None, narrow: bool = False
) -> None:
    """Shard what is not sharded yet as one unit; gradients are summed, since each loss is a share of the global one."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, False) if narrow else MixedPrecisionPolicy()
    # Meshes are real even for a plan, which uses fake tensors.
    with unset_fake_temporarily():
        fully_shard(list(modules), mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    first = modules[0]
    assert isinstance(first, FSDPModule)
    first.set_gradient_divide_factor(1.0)
    first.set_force_sum_reduction_for_comms(True)


def synchronize_gradients(model: LoopedLM, last: bool) -> None:
    """Reduce gradients over processes only in the last of several accumulated backward passes."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


def hold_gradients(model: LoopedLM) -> list[Tensor]:
    """Zeros where gradients of earlier micro-batches are kept until the last: whole, in fp32; all of them."""
    if not isinstance(model, FSDPModule):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    held = []
    for sharded in (each for state in states for group in state._fsdp_param_groups for each in group.fsdp_params):
        # FSDP has no public way to give it gradients; tests compare this with micro-batches that are run.
        gradient: Tensor = torch.zeros(sharded._orig_size, dtype=torch.float32)
        spec = sharded._unsharded_dtensor_spec
        if spec is not None:
            gradient = DTensor.from_local(gradient, spec.mesh, spec.placements, run_check=False)
        sharded.unsharded_accumulated_grad = gradient
        held.append(gradient)
    return held
