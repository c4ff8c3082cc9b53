"""Copies, shards and experts: any mesh gives the losses of one process, and goes on from any checkpoint."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from support import config, losses, run_training
from torch.nn import functional as F

import looptim as lo
from looptim.config import Config, ParallelConfig
from looptim.model import Experts
from looptim.training.mesh import Sizes

MESHES = {
    "fsdp 2": (2, {}),
    "experts 2": (2, {"expert": 2}),
    "fsdp 4": (4, {}),
    "copies 2 x 2": (4, {"replicate": 2, "shard": 2}),
    "experts 4": (4, {"expert": 4}),
    "copies 2, experts 2": (4, {"replicate": 2, "expert": 2}),
    "fsdp 8": (8, {}),
    "copies 2, experts 2 of 4": (8, {"replicate": 2, "expert": 2}),
    "copies 2, experts 4": (8, {"replicate": 2, "expert": 4}),
}


def recipe() -> Config:
    """OperLoop with experts, Muon, micro-batches, documents kept apart and clipping that acts."""
    apart = {"mask_attention": True, "mask_boundaries": True}
    model = {"layout": "1-2x3-1", "experts": 8, "top_k": 3, "init_std": 0.1}
    every = {"valid_every": 10, "checkpoint_every": 10}
    return config(model=model, data=apart, optim={"clip": 0.5}, steps=20, batch_size=16, micro_batch=1, **every)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run of one process, and its recipe."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "recipe.toml").write_text(recipe().to_toml())
    lo.train(recipe(), folder / "one", progress=False)
    return folder


def half(before, out, step=10):
    """A run that has come to the checkpoint of another."""
    name = f"checkpoints/step_{step:06d}"
    shutil.copytree(before / name, out / name)
    shutil.copy(before / "config.toml", out)
    return out


def continues(mesh, recipe, before, out, step=10):
    return trains(mesh, recipe, half(before, out, step), "--resume")


def trains(mesh, recipe, out, *extra):
    processes, keys = MESHES[mesh]
    done = run_training(processes, recipe, out, *extra, *(f"--set=parallel.{k}={v}" for k, v in keys.items()))
    assert done.returncode == 0, done.stderr
    return losses(out)


@pytest.mark.long
def test_copies_and_experts_continue_what_one_process_began(tmp_path):
    few = config(steps=6, valid_every=6, checkpoint_every=3, micro_batch=1)
    (tmp_path / "recipe.toml").write_text(few.to_toml())
    expected = losses(lo.train(few, tmp_path / "one", progress=False))
    found = continues("copies 2, experts 2", tmp_path / "recipe.toml", tmp_path / "one", tmp_path / "four", step=3)
    assert found == {step: pytest.approx(expected[step], rel=1e-5) for step in range(4, 7)}
    # What processes wrote that each have their experts loads on one that has all.
    model, reference = lo.load(tmp_path / "four")[0], lo.load(tmp_path / "one")[0]
    for (name, a), b in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.long
def test_parameters_that_are_gathered_in_bf16_train_as_autocast_does_on_one_process(tmp_path):
    few = config(model={"layout": "1-1x2-1"}, steps=6, valid_every=6, dtype="bf16", micro_batch=1)
    (tmp_path / "recipe.toml").write_text(few.to_toml())
    expected = losses(lo.train(few, tmp_path / "one", progress=False))
    found = trains("experts 2", tmp_path / "recipe.toml", tmp_path / "two")
    assert found == {step: pytest.approx(loss, rel=1e-3) for step, loss in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_gives_the_losses_of_one_process_and_its_checkpoints_go_anywhere(mesh, one, tmp_path):
    expected = losses(one / "one")
    found = trains(mesh, one / "recipe.toml", tmp_path / "mesh")
    assert found == {step: pytest.approx(loss, rel=1e-5) for step, loss in expected.items()}
    names = list(MESHES)
    others = [names[(names.index(mesh) + 1) % len(names)], names[(names.index(mesh) + 3) % len(names)]]
    for index, other in enumerate(others):
        found = continues(other, one / "recipe.toml", tmp_path / "mesh", tmp_path / str(index))
        assert found == {step: pytest.approx(expected[step], rel=1e-5) for step in range(11, 21)}, other
    alone = lo.train(recipe(), half(tmp_path / "mesh", tmp_path / "alone"), resume=True, progress=False)
    assert losses(alone) == {step: pytest.approx(expected[step], rel=1e-5) for step in range(11, 21)}


@pytest.mark.parametrize(
    ("keys", "processes", "message"),
    [
        ({"replicate": 3}, 8, r"parallel.replicate \(3\) does not multiply to 8 processes"),
        ({"replicate": 2, "shard": 2}, 8, r"parallel.replicate \(2\) x shard \(2\) does not multiply to 8 processes"),
        ({"expert": 2}, 1, r"parallel.expert \(2\) must divide the 1 processes"),
        ({"replicate": 2, "expert": 8}, 8, r"parallel.expert \(8\) must divide the 4 processes"),
    ],
)
def test_a_mesh_that_does_not_fit_the_processes_is_one_sentence(keys, processes, message):
    with pytest.raises(ValueError, match=message):
        Sizes.of(ParallelConfig(**keys), processes)


def test_experts_must_divide():
    with pytest.raises(ValueError, match=r"model.experts \(4\) must be a multiple of parallel.expert \(3\)"):
        Config(model=lo.ModelConfig.tiny(), train={"seq_len": 32}, parallel={"expert": 3})


@pytest.mark.long
def test_how_processes_share_the_work_does_not_make_another_run(tmp_path):
    few = config(steps=3, valid_every=3)
    lo.train(few, tmp_path / "run", progress=False)
    shared = few.model_copy(update={"parallel": ParallelConfig(shard=1)})
    before = losses(tmp_path / "run")
    assert lo.train(shared, tmp_path / "run", resume=True, progress=False) == tmp_path / "run"
    assert losses(tmp_path / "run") == before and list(before) == [1, 2, 3]


# Of six experts two live on each of three processes; the loads are as uneven as can be.
EXCHANGE = """
import sys, torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from looptim.model import Experts, Routing
from looptim.training.exchange import AllToAll

dist.init_process_group("gloo")
rank = dist.get_rank()
data = torch.load(sys.argv[1])
experts = Experts(8, experts=6, hidden=4)
experts.load_state_dict(data["weights"])
mesh = dist.device_mesh.init_device_mesh("cpu", (3,))
for name, p in list(experts.named_parameters()):
    experts.register_parameter(name, torch.nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))
experts.exchange = AllToAll(mesh.get_group(), 6)
found = []
for x, indices, weights in data["cases"]:
    x = x[rank].requires_grad_()
    weights = weights[rank].requires_grad_()
    y = experts(x, Routing(indices[rank], weights, weights))
    y.square().sum().backward()
    found.append((y.detach(), x.grad, weights.grad))
gradients = {name: p.grad.full_tensor() for name, p in experts.named_parameters()}
torch.save((found, gradients), f"{sys.argv[1]}.{rank}")
"""


@pytest.mark.long
def test_no_row_is_lost_however_uneven_the_loads(tmp_path):
    experts = Experts(8, experts=6, hidden=4)
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_()
    uneven = torch.stack([torch.full((5, 2), 0), torch.full((5, 2), 5), torch.tensor([[0, 1], [1, 2]] * 2 + [[4, 5]])])
    one_only = torch.zeros(3, 5, 2, dtype=torch.long)
    cases = [(torch.randn(3, 5, 8), indices, torch.rand(3, 5, 2)) for indices in (uneven, one_only)]
    torch.save({"weights": experts.state_dict(), "cases": cases}, tmp_path / "data")
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command = [sys.executable, *launch, str(tmp_path / "exchange.py"), str(tmp_path / "data")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    found = [torch.load(f"{tmp_path / 'data'}.{rank}") for rank in range(3)]
    for number, (x, indices, weights) in enumerate(cases):
        x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = straight(experts, x.flatten(0, 1), indices.flatten(0, 1), weights.flatten(0, 1)).view_as(x)
        y.square().sum().backward()
        for rank in range(3):
            expected = (y[rank].detach(), x.grad[rank], weights.grad[rank])
            torch.testing.assert_close(found[rank][0][number], expected, rtol=1e-4, atol=1e-4)
    for name, p in experts.named_parameters():
        torch.testing.assert_close(found[0][1][name], p.grad, rtol=1e-4, atol=1e-4)


def straight(experts, x, indices, weights):
    """The sum over each token's experts, written out."""
    rows = []
    for token, chosen, weight in zip(x, indices, weights, strict=True):
        outputs = [
            w * (experts.down[e] @ (F.silu(experts.gate[e] @ token) * (experts.up[e] @ token)))
            for e, w in zip(chosen, weight, strict=True)
        ]
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)
