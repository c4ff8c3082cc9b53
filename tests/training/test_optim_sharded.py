"""The optimizer on two processes gives what it gives on one. Run as a script, this file is one of the processes."""

import copy
import datetime
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from looptim.base.numerics import polar_express
from looptim.config import ModelConfig
from looptim.model.lm import LoopedLM
from looptim.training.optim import MuonAdamW, clip_gradients, parameter_groups
from looptim.training.optim.muon import orthogonalize

pytestmark = pytest.mark.long

WORLD = 2
STEPS = 5
LR = 5e-3
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
# Nothing is even: rows of 45 and 61, five experts, vectors of seven.
SIZES = {
    "layout": "1-2x2-1",
    "width": 28,
    "vocab_size": 61,
    "tied": False,
    "pattern": "SSSF",
    "heads": 3,
    "head_dim": 10,
}
SIZES |= {"sliding_rotary": 10, "full_rotary": 4, "dense_hidden": 45, "experts": 5, "expert_hidden": 7}
SIZES |= {"shared_hidden": 9, "init_std": 0.006}
# The name of a run: its changes to the config, its dtype, and how far two processes may be from one.
MODELS = {
    "untied": ({}, torch.float32, 1e-5),
    "tied": ({"tied": True}, torch.float64, 1e-11),
}
LAYOUTS = {
    "rows": ((7, 5), Shard(0)),
    "columns": ((7, 5), Shard(1)),
    "one row": ((1, 5), Shard(0)),
    "experts": ((3, 4, 5), Shard(0)),
    "one expert": ((1, 4, 5), Shard(0)),
    "rows of experts": ((3, 5, 4), Shard(1)),
    "replicated": ((7, 5), Replicate()),
}


def build(name, world=1):
    changes, dtype, _ = MODELS[name]
    model = LoopedLM(ModelConfig.tiny(**SIZES | changes), seed=0).to(dtype)
    # The initial 0.006 hides what goes on behind the embedding.
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.startswith("blocks.") and p.dim() > 1:
                p.mul_(10)
    if world > 1:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(model)
        register_fsdp_forward_method(model, "loss")
    return model, MuonAdamW(parameter_groups(model, lr=LR))


def train(model, optimizer, first=0, rank=0, world=1):
    """Losses and gradient norms of `STEPS` steps; each process has every `world`-th sequence of the batch."""
    history = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(SIZES["vocab_size"], (4, 17), generator=generator)[rank::world]
        loss = model.loss(tokens[:, :-1], tokens[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        loss = loss.detach() / world
        if world > 1:
            dist.all_reduce(loss)
        history.append((loss.item(), norm.item()))
    return history


def state(model, optimizer):
    found = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
    # Copies: some tensors of a state dict are those that training goes on to change.
    return dict(zip(("model", "optimizer"), copy.deepcopy(found), strict=True))


def matrices(shape, count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def gradients():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(5, 3, generator=generator) for _ in range(3)]


def work(rank, folder):
    """What one process does; the first one writes down the results."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=120),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    results = {}
    for name in MODELS:
        model, optimizer = build(name, WORLD)
        history = train(model, optimizer, rank=rank, world=WORLD)
        results[name] = {"history": history, **state(model, optimizer)}
        results[name]["resumes"] = resumes(name, model, optimizer, rank=rank, folder=folder)
    results["loaded"] = continue_single(rank, folder)
    for name, (shape, placement) in LAYOUTS.items():
        for count in (1, 3):
            parts = [distribute_tensor(m, mesh, [placement]) for m in matrices(shape, count)]
            polar = orthogonalize([p.to_local() for p in parts], like=parts[0], steps=6)
            wrapped = [
                DTensor.from_local(p, mesh, [placement], shape=torch.Size(shape), stride=parts[0].stride())
                for p in polar
            ]
            results[name, count] = [w.full_tensor() for w in wrapped]
    results["clipped"] = clip_mixed(mesh)
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.barrier()
    dist.destroy_process_group()


def resumes(name, model, optimizer, *, rank, folder):
    """Whether a run goes on from a checkpoint by DCP as if it had not been interrupted, bit for bit."""

    def sharded(model, optimizer):
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    dcp.save(sharded(model, optimizer), checkpoint_id=f"{folder}/{name}")
    straight = train(model, optimizer, STEPS, rank, WORLD)
    again, optimizer_again = build(name, WORLD)
    loaded = sharded(again, optimizer_again)
    dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
    set_model_state_dict(again, loaded["model"])
    set_optimizer_state_dict(again, optimizer_again, loaded["optimizer"])
    resumed = train(again, optimizer_again, STEPS, rank, WORLD)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    equal = all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs)
    return straight == resumed and equal


def continue_single(rank, folder):
    """The losses after loading what one process has saved."""
    saved = torch.load(f"{folder}/single.pt")
    model, optimizer = build("untied", WORLD)
    set_model_state_dict(model, saved["model"], options=FULL)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=FULL)
    return train(model, optimizer, STEPS, rank, WORLD)


def clip_mixed(mesh):
    """Gradients that are sharded, replicated on a mesh, and plain, clipped together."""
    first, second, third = gradients()
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])),
        torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Replicate()])),
        torch.nn.Parameter(torch.zeros(5, 3)),
    ]
    parameters[0].grad = distribute_tensor(first, mesh, [Shard(0)])
    parameters[1].grad = distribute_tensor(second, mesh, [Replicate()])
    parameters[2].grad = third
    norm = clip_gradients(parameters, 1.0)
    return norm, [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]


@pytest.fixture(scope="module")
def single():
    """One process: the histories and final states, and how the runs go on."""
    found = {}
    for name in MODELS:
        model, optimizer = build(name)
        found[name] = {"history": train(model, optimizer), **state(model, optimizer)}
        found[name]["later"] = train(model, optimizer, STEPS)
    return found


@pytest.fixture(scope="module")
def sharded(single, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    torch.save(single["untied"], folder / "single.pt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(WORLD):
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, __file__, str(rank), str(folder)]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"{rank}.log").read_text() for rank in range(WORLD))
    assert codes == [0] * WORLD, logs
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_train_as_one(sharded, single, name):
    found, expected, tolerance = sharded[name], single[name], MODELS[name][2]
    assert found["history"] == [pytest.approx(pair, rel=tolerance) for pair in expected["history"]]
    assert found["model"].keys() == expected["model"].keys()
    for key, tensor in expected["model"].items():
        # A gate that starts at 0 is measured by how far five steps may take it.
        size = max(tensor.norm(), STEPS * LR * tensor.numel() ** 0.5)
        assert (found["model"][key] - tensor).norm() <= tolerance * size, key


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_have_the_optimizer_state_of_one(sharded, single, name):
    found, expected = sharded[name]["optimizer"], single[name]["optimizer"]
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for key, tensors in expected["state"].items():
        assert found["state"][key].keys() == tensors.keys()
        for kind, tensor in tensors.items():
            assert (found["state"][key][kind] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-9, (key, kind)


@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_checkpoint_continues_bit_exactly(sharded, name):
    assert sharded[name]["resumes"]


def test_a_checkpoint_of_one_process_continues_on_two(sharded, single):
    assert sharded["loaded"] == [pytest.approx(pair, rel=1e-5) for pair in single["untied"]["later"]]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("count", [1, 3])
def test_sharded_matrices_are_orthogonalized_whole(sharded, name, count):
    shape, _ = LAYOUTS[name]
    for found, matrix in zip(sharded[name, count], matrices(shape, count), strict=True):
        torch.testing.assert_close(found, polar_express(matrix))


def test_clipping_over_sharded_replicated_and_plain_gradients(sharded):
    norm, clipped = sharded["clipped"]
    total = torch.stack(gradients()).norm()
    torch.testing.assert_close(norm, total)
    for found, gradient in zip(clipped, gradients(), strict=True):
        torch.testing.assert_close(found, gradient / (total + 1e-6))


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2])
