"""Tokens that leave a model that two processes hold together. Run as a script, this file is one of the processes."""

import datetime
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method

from looptim.config import Config, ModelConfig, ParallelConfig
from looptim.loop.depth import Exit, PerToken
from looptim.model.lm import LoopedLM
from looptim.training import mesh
from looptim.training.distributed import World

pytestmark = pytest.mark.long


def test_two_processes_compute_what_one_does():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run(
        [sys.executable, *launch],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("depths, predictions and gradients agree") == 2


def recorded(model, tokens, depth):
    with torch.no_grad():
        hidden = model.hidden(model.embed(tokens), depth=depth)
    return hidden.depth[0], hidden.h


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank = dist.get_rank()
    # The auxiliary loss is a mean over visits, which two processes that are left at different ones do not share.
    shape = ModelConfig.tiny(layout="1-1x4-1", dense_layers=0, init_std=0.2, aux_coefficient=0.0)
    config = Config(model=shape, train={"seq_len": 16})
    whole = LoopedLM(shape, seed=config.train.seed)
    world = World(rank, 2, torch.device("cpu"))
    sharded = mesh.build(config, world, mesh.open_mesh(ParallelConfig(), world))
    for name in ("hidden", "embed"):
        register_fsdp_forward_method(sharded, name)
    x = torch.randint(257, (4, 10), generator=torch.Generator().manual_seed(0))
    mine = slice(2 * rank, 2 * rank + 2)

    depth = Exit("residual", THRESHOLD, mode="mask")
    depths, h = recorded(whole, x, depth)
    assert depths.unique().numel() > 1, depths
    found, h_mine = recorded(sharded, x[mine], depth)
    assert torch.equal(found, depths[mine])
    torch.testing.assert_close(h_mine, h[mine], rtol=1e-5, atol=1e-5)

    # One process has nobody left after the second loop, and still runs all steps with the other.
    depths[:2] = depths[:2].clamp(max=2)
    whole.checkpointing = sharded.checkpointing = True
    whole.loss(x, x, depth=PerToken(depths, mode="mask")).loss.backward()
    (sharded.loss(x[mine], x[mine], depth=PerToken(depths[mine], mode="mask")).loss / 2).backward()
    for (name, wanted), got in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert (wanted.grad is None) == (got.grad is None), name
        if wanted.grad is not None:
            torch.testing.assert_close(got.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-6, msg=name)
    print("depths, predictions and gradients agree")
    dist.destroy_process_group()


THRESHOLD = 0.45

if __name__ == "__main__":
    main()
