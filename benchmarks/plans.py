"""Plans of all recipes of the paper on 64 GPUs of 80 GB, and of cases in which expert parallelism is of use.

    python benchmarks/plans.py docs/results/plans.json docs/scale.md --jobs 2

makes the plans that the first file does not have yet, each as `looptim plan RECIPE --gpus 64 --nodes 8 --set ...` does,
and writes the tables of the second one, between comments that name them. A plan takes half a minute of CPU.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import looptim as lo
from looptim.recipe import shipped
from looptim.training.plan_table import parse_gpu

GPUS, NODES = 64, 8
SET = "train.activation_checkpointing=true"
TEN = "paper/32/loop3-operloop"
FEW = "model.layout=2-4x3-2 train.batch_size=64 train.micro_batch=1"
CASES = {
    "the paper's experts": (TEN, "", ""),
    "the paper's experts, 48 GB": ("paper/32/baseline", "", "memory=48"),
    "one sequence at a time": (TEN, "train.micro_batch=1", ""),
    "width 384 to 2048, 64 experts": (TEN, f"{FEW} model.experts=64 model.expert_hidden=2048", ""),
    "the same, top 2": (TEN, f"{FEW} model.experts=64 model.expert_hidden=2048 model.top_k=2", ""),
    "the same, no loop": (TEN, f"{FEW} model.layout=8 model.experts=64 model.expert_hidden=2048 model.top_k=2", ""),
}
"""Where experts are to be gathered or tokens to travel: recipe, changed keys, and changed assumptions."""


def make(recipe: str, changes: str, gpu: str) -> dict[str, Any]:
    """A plan, without the list of its collectives."""
    config = lo.load_config(recipe, set=[SET, *changes.split()])
    answer = lo.plan(config, gpus=GPUS, nodes=NODES, gpu=parse_gpu(gpu.split()))
    for mesh in answer["meshes"]:
        del mesh["collectives"]
    return answer


def wanted() -> dict[str, tuple[str, str, str]]:
    recipes = {each: (each, "", "") for each in shipped("recipes") if each.startswith("paper/")}
    return recipes | {" | ".join(case): case for case in CASES.values()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    plans = json.loads(given.plans.read_text()) if given.plans.is_file() else {}
    with ProcessPoolExecutor(given.jobs) as pool:
        waiting = {pool.submit(make, *case): key for key, case in wanted().items() if key not in plans}
        for done in as_completed(waiting):
            plans[waiting[done]] = done.result()
            print(waiting[done], flush=True)
            lines = [f"{json.dumps(key)}: {json.dumps(plans[key])}" for key in wanted() if key in plans]
            given.plans.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
