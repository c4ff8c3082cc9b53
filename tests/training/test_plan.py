"""A plan agrees with what processes do: bytes of parameters and optimizer, every collective, activations."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import config, run
from torch._subclasses.fake_tensor import FakeTensorMode

import looptim as lo
from looptim.config import Config, ParallelConfig
from looptim.model import Experts
from looptim.training.mesh import build, open_mesh
from looptim.training.plan import Cluster, Gpu, _examine, do_without_values, fake_processes, rehearse_once
from looptim.training.plan_table import parse_gpu

# What one of the processes does; the first writes down what it did, and how many rows went where.
REAL = """
import dataclasses, json, sys
import torch
import looptim as lo
from looptim.model import Experts
from looptim.training import distributed
from looptim.training.mesh import build, open_mesh
from looptim.training.plan import rehearse
world, config = distributed.start(), lo.load_config(sys.argv[1])
model = build(config, world, open_mesh(config.parallel, world))
sizes = []
for module in model.modules():
    if isinstance(module, Experts) and module.exchange is not None:
        def read(sent, got, before=module.exchange.read):
            sizes.append(before(sent, got))
            return sizes[-1]
        module.exchange = dataclasses.replace(module.exchange, read=read)
seen = rehearse(config, world, model)
if world.first:
    print(json.dumps({"collectives": seen.collectives, "peak": seen.peak, "sizes": sizes}))
"""


def measured(recipe, processes, folder):
    (folder / "real.py").write_text(REAL)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launch, str(folder / "real.py"), str(recipe)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def planned(recipe: Config, processes, sizes):
    """The same with fake tensors, for the given loads."""
    given = iter(sizes)
    with fake_processes(processes) as world:
        mesh = open_mesh(recipe.parallel, world)
        with FakeTensorMode():
            model = build(recipe, world, mesh)
            do_without_values(model, recipe, world)
            for module in model.modules():
                if isinstance(module, Experts) and module.exchange is not None:
                    module.exchange = dataclasses.replace(module.exchange, read=lambda sent, got: next(given))
            return rehearse_once(recipe, world, model)


def disagreements(processes, keys, tmp_path, **train):
    """Where a plan differs from what processes do, activations by more than a tenth."""
    recipe = config(model={"experts": 8}, batch_size=2 * processes, micro_batch=1, **train)
    recipe = recipe.model_copy(update={"parallel": ParallelConfig(**keys)})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    real = measured(tmp_path / "recipe.toml", processes, tmp_path)
    fake = planned(recipe, processes, real["sizes"])
    planned_peak, peak = {**fake.peak, "all": fake.peak.total()}, {**real["peak"], "all": sum(real["peak"].values())}
    assert min(peak["parameters"], peak["optimizer"]) > 0 and real["collectives"]
    agreed = {part: planned_peak[part] == peak[part] for part in ("parameters", "optimizer")}
    agreed |= {part: planned_peak[part] == pytest.approx(peak[part], rel=0.1) for part in ("activations", "all")}
    agreed["collectives"] = [[*c[:3], list(c.ranks), c.module] for c in fake.collectives] == real["collectives"]
    return [part for part, same in agreed.items() if not same]


@pytest.mark.long
def test_a_plan_for_two_processes_agrees_with_what_they_do(tmp_path):
    assert disagreements(2, {"expert": 2}, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"replicate": 2}, {"expert": 4}, {"replicate": 2, "expert": 2}], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_plan_for_eight_processes_agrees_with_what_they_do(keys, recompute, tmp_path):
    assert disagreements(8, keys, tmp_path, activation_checkpointing=recompute) == []


@pytest.mark.long
def test_a_plan_lists_meshes_says_which_to_take_and_what_would_fit():
    small = config(model={"experts": 8}, batch_size=16, micro_batch=2)
    answer = lo.plan(small, gpus=4, nodes=2)
    meshes = [tuple(found["mesh"].values()) for found in answer["meshes"]]
    assert meshes == [(1, 4, 1), (1, 4, 2), (2, 2, 1), (2, 2, 2)]
    fsdp, spread, copies, both = answer["meshes"]
    assert copies["bytes_between_nodes"] < spread["bytes_between_nodes"] < fsdp["bytes_between_nodes"]
    travels = [row for row in both["collectives"] if row["kind"] == "all-to-all" and row["phase"] != "optimizer step"]
    assert {row["link"] for row in travels} == {"inside a node"}
    assert answer["recommended"] is not None and answer["change"] is None
    # The activations of two sequences do not fit, and those of one do.
    peaks = [found["memory_gb"]["peak"] for found in answer["meshes"]]
    short = lo.plan(small, gpus=4, nodes=2, gpu=Gpu(memory=0.9 * min(peaks), reserve=0.0))
    assert short["recommended"] is None
    assert short["change"].startswith("train.activation_checkpointing=true")


@pytest.mark.long
def test_the_command_prints_a_table_bars_and_a_verdict(tmp_path):
    (tmp_path / "recipe.toml").write_text(config(batch_size=4).to_toml())
    done = run("plan", str(tmp_path / "recipe.toml"), "--gpus", "2")
    assert done.returncode == 0, done.stderr
    assert "FSDP 2, experts 2" in done.stdout and "A activations" in done.stdout and "recommended: " in done.stdout
    bad = run("plan", str(tmp_path / "recipe.toml"), "--gpus", "3", "--nodes", "2")
    assert (
        bad.returncode == 2 and bad.stderr == "looptim: --gpus 3 must be a multiple of --nodes 2, and both at least 1\n"
    )


def test_what_is_assumed_of_a_gpu_can_be_changed():
    assert parse_gpu(["memory=141", "between=100"]) == Gpu(memory=141, between=100)
    with pytest.raises(ValueError, match="unknown key 'memry', did you mean 'memory'"):
        parse_gpu(["memry=3"])


def test_the_keys_of_a_mesh_are_written_to_a_recipe():
    shared = config().model_copy(update={"parallel": ParallelConfig(expert=2)})
    assert tomllib.loads(shared.to_toml())["parallel"] == {"replicate": 1, "expert": 2}


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plans():
    """The script that makes the plans of the docs, and what it has made."""
    spec = importlib.util.spec_from_file_location("plans", ROOT / "benchmarks" / "plans.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script, json.loads((ROOT / "docs" / "results" / "plans.json").read_text())


def test_the_tables_of_the_docs_are_those_of_the_plans(plans):
    script, made = plans
    assert made.keys() <= script.wanted().keys()
    page = (ROOT / "docs" / "scale.md").read_text()
    assert script.write_tables(page, made) == page


def test_copies_on_nodes_have_a_sixth_of_the_traffic_between_them_in_every_layer(plans):
    script, made = plans
    ten = made[script.TEN]
    everywhere, *_ = ten["meshes"]
    assert everywhere["mesh"] == {"replicate": 1, "shard": 64, "expert": 1}
    before, now = script.layer_bytes(everywhere), script.layer_bytes(script.taken(ten))
    # Looped layers, other layers, and the whole update, optimizer included.
    for kind in (0, 1, 3):
        assert before[kind] >= 6 * now[kind] > 0


@pytest.mark.slow
def test_what_the_docs_plan_for_ten_billion_parameters_is_what_is_planned_now(plans):
    script, made = plans
    recipe = lo.load_config(script.TEN, set=[script.SET])
    for known in made[script.TEN]["meshes"]:
        keys = ParallelConfig(**known["mesh"])
        found = _examine(recipe.model_copy(update={"parallel": keys}), Cluster(script.GPUS, script.NODES, Gpu()))
        assert {key: found[key] for key in known} == known
