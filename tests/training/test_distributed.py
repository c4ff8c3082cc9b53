"""Two processes under torchrun: the losses of one, checkpoints that load on either, one sentence for mistakes."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import config, losses, run_training

import looptim as lo
from looptim.training import mesh
from looptim.training.distributed import World, _renew

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def twenty_steps(tmp_path_factory):
    """OperLoop with MoE and Muon for 20 steps: the recipe, and the run of one process, which also stopped at ten."""
    folder = tmp_path_factory.mktemp("parallel")
    recipe = folder / "recipe.toml"
    recipe.write_text(config(steps=20, valid_every=10, checkpoint_every=10).to_toml())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lo.train(lo.load_config(recipe), folder / "one", progress=False)
    torch.set_num_threads(threads)
    return recipe, folder / "one"


def test_two_processes_give_the_losses_of_one(twenty_steps, tmp_path):
    recipe, one = twenty_steps
    done = run_training(2, recipe, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    expected, got = losses(one), losses(tmp_path / "two")
    assert expected.keys() == got.keys()
    for step, loss in expected.items():
        assert got[step] == pytest.approx(loss, rel=1e-5), step

    def last_validation(run):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]["valid_loss"]

    assert last_validation(tmp_path / "two") == pytest.approx(last_validation(one), rel=1e-5)
    # The checkpoint two processes wrote loads on one.
    model, _ = lo.load(tmp_path / "two")
    reference, _ = lo.load(one)
    for (name, a), b in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_a_checkpoint_of_one_process_continues_on_two(twenty_steps, tmp_path):
    recipe, one = twenty_steps
    half = tmp_path / "half"
    shutil.copytree(one / "checkpoints" / "step_000010", half / "checkpoints" / "step_000010")
    shutil.copy(one / "config.toml", half)
    done = run_training(2, recipe, half, "--resume")
    assert done.returncode == 0, done.stderr
    for step, loss in losses(half).items():
        assert loss == pytest.approx(losses(one)[step], rel=1e-5), step
    assert max(losses(half)) == 20


def test_what_makes_a_run_small_or_random_gives_the_losses_of_one_process_on_two(tmp_path):
    recipe = tmp_path / "recipe.toml"
    shared = {"loop": {"preset": "huginn", "options": {"start": "prelude"}}, "init_std": 0.3}
    loops = {"scheme": "parcae", "mean": 3.0, "grad_loops": 2}
    inside = {"mask_attention": True}
    pieces = {"micro_batch": 1, "activation_checkpointing": True}
    small = config(model=shared, data=inside, steps=4, valid_every=4, loops=loops, **pieces)
    recipe.write_text(small.to_toml())
    done = run_training(2, recipe, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    one = losses(lo.train(small, tmp_path / "one", progress=False))
    for step, loss in losses(tmp_path / "two").items():
        assert loss == pytest.approx(one[step], rel=1e-4), step


def test_what_the_first_process_fails_at_is_said_once(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(config(data={"source": "nowhere.txt", "options": {}}).to_toml())
    done = run_training(2, recipe, tmp_path / "run")
    assert done.returncode != 0
    assert done.stderr.count("data source 'nowhere.txt' matches no file") == 1
    # One traceback is torchrun's own, none that of a process whose peer has gone.
    assert done.stderr.count("Traceback") <= 1 and "Connection closed" not in done.stderr
    assert not Path(tmp_path / "run").exists()


def test_a_mistake_in_the_recipe_is_said_once(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(config().to_toml())
    done = run_training(2, recipe, tmp_path / "run", "--set", "train.stepz=3")
    assert done.returncode != 0
    assert done.stderr.count("unknown key 'stepz'") == 1
    done = run_training(2, recipe, tmp_path / "run", "--set", "parallel.replicate=3")
    assert done.returncode != 0
    assert done.stderr.count("parallel.replicate (3) does not multiply to 2 processes") == 1
    assert not (tmp_path / "run").exists()


TWICE = """
import sys
import looptim as lo
for name in ("first", "second"):
    lo.train(lo.load_config(sys.argv[1]), f"{sys.argv[2]}/{name}", progress=False)
"""


def test_processes_can_train_twice(tmp_path):
    (tmp_path / "recipe.toml").write_text(config(steps=3, valid_every=3).to_toml())
    (tmp_path / "twice.py").write_text(TWICE)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, str(tmp_path / "twice.py"), str(tmp_path / "recipe.toml"), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "first") == losses(tmp_path / "second") != {}


def test_a_block_is_sharded_before_the_next_is_built(monkeypatch):
    def held():
        return sum(p.numel() for p in gc.get_objects() if type(p) is torch.nn.Parameter)

    def shard(modules, *_, **options):
        found.append(held() - before)
        for p in modules[0].parameters():
            p.data = p.new_empty(0)

    recipe = config(model={"layout": "6", "loop": {"preset": "none"}, "dense_layers": 0})
    gc.collect()
    found, before = [], held()
    whole = lo.LoopedLM(recipe.model)
    size, block = held() - before, sum(p.numel() for p in whole.blocks[0].parameters())
    del whole
    monkeypatch.setattr(mesh, "_shard", shard)
    monkeypatch.setattr(mesh, "register_fsdp_forward_method", lambda *_: None)
    mesh.build(recipe, World(0, 2, torch.device("cpu")), mesh.Mesh(None, None, None))
    assert len(found) == 7
    assert max(found) <= size - 5 * block


def test_more_processes_than_the_batch_can_feed(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(config(batch_size=3).to_toml())
    done = run_training(2, recipe, tmp_path / "run")
    assert done.returncode != 0
    assert "train.batch_size (3) must be a multiple of the number of processes (2)" in done.stderr
    assert not Path(tmp_path / "run").exists()


LONE = """
import datetime
from looptim.training import distributed
distributed.CONNECT = datetime.timedelta(seconds=1)
distributed.start()
"""


def test_a_process_that_finds_no_other_says_so_after_a_while(tmp_path):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    done = subprocess.run(
        [sys.executable, "-c", LONE], capture_output=True, text=True, timeout=120, env={**os.environ, **place}
    )
    assert done.returncode == 1
    assert re.match(r"ValueError: 2 processes did not find each other in \d+ s \(", done.stderr.splitlines()[-1])


def test_processes_that_are_started_again_never_meet_those_of_before():
    """Not even where the store still has their names, and where each comes when it likes."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for life, size in enumerate((4, 2, 3, 2)):

        def join(rank, life=life, size=size):
            time.sleep(0.1 * ((rank + life) % size))
            store = dist.TCPStore("127.0.0.1", server.port, None, False, timeout=timedelta(seconds=60))
            store = _renew(store, rank, size)
            store.set(f"life of {rank}", str(life))
            return [int(store.get(f"life of {each}")) for each in range(size)]

        with ThreadPoolExecutor(size) as pool:
            assert list(pool.map(join, range(size))) == [[life] * size] * size
