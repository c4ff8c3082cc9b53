"""Plans of all recipes of the paper on 64 GPUs of 80 GB, and of some cases for and against expert parallelism.

    python benchmarks/plans.py docs/results/plans.json docs/scale.md --jobs 2

makes the plans that the first file does not have yet, each as `looptim plan RECIPE --gpus 64 --nodes 8 --set ...` does,
and writes the tables of the second file, each after a comment that names it. A plan takes half a minute of CPU.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import looptim as lo
from looptim.model import Layout
from looptim.recipe import shipped
from looptim.training.plan import PARTS, STEP
from looptim.training.plan_table import cells, name, parse_gpu

GPUS, NODES = 64, 8
SET = "train.activation_checkpointing=true"
TEN, PLAIN = "paper/32/loop3-operloop", "paper/32/baseline"
ONE = "train.micro_batch=1"
FEW = f"{ONE} model.experts=64 model.expert_hidden=1536 model.top_k=2"
MANY = FEW.replace("64", "128")
CASES = {
    "the paper's experts: 256 of width 384, top 8": ("paper/18/baseline", "", ""),
    "the paper's experts, 32 GB a GPU": ("paper/18/baseline", "", "memory=32"),
    "the paper's experts, one sequence a micro-batch": ("paper/18/baseline", ONE, ""),
    "64 experts of width 1536, top 2, one sequence": ("paper/18/baseline", FEW, ""),
    "128 experts of width 1536, top 2, one sequence": ("paper/18/baseline", MANY, ""),
    "128 of them, looped": ("paper/18/loop3-operloop", MANY, ""),
}
"""Where experts are gathered and where tokens travel: recipe, changed keys, and what is assumed of a GPU."""

Table = tuple[Sequence[str], list[list[str]]]


def key_of(recipe: str, changes: str, gpu: str) -> str:
    return " | ".join(filter(None, (recipe, changes, gpu)))


def wanted() -> dict[str, tuple[str, str, str]]:
    recipes = sorted(each for each in shipped("recipes") if each.startswith("paper/"))
    return {key_of(*case): case for case in (*((each, "", "") for each in recipes), *CASES.values())}


def make(recipe: str, changes: str, gpu: str) -> dict[str, Any]:
    """A plan, without the list of its collectives."""
    config = lo.load_config(recipe, set=[SET, *changes.split()])
    answer = lo.plan(config, gpus=GPUS, nodes=NODES, gpu=parse_gpu(gpu.split()))
    for mesh in answer["meshes"]:
        del mesh["collectives"]
    return answer


def label(answer: Mapping[str, Any], mesh: Mapping[str, Any]) -> str:
    return name(mesh["mesh"]) + (" (recommended)" if mesh["mesh"] == answer["recommended"] else "")


def taken(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(mesh for mesh in answer["meshes"] if mesh["mesh"] == answer["recommended"])


def memory_table(plans: Mapping[str, Any]) -> Table:
    shown = (*PARTS[:5], "peak")
    rows = [
        [
            f"{key.removeprefix('paper/')}, {label(plans[key], mesh)}",
            *(f"{mesh['memory_gb'][part]:.1f}" for part in shown),
        ]
        for key in (TEN, PLAIN)
        if key in plans
        for mesh in plans[key]["meshes"]
    ]
    return ("recipe and mesh", *shown), rows


def mesh_table(plans: Mapping[str, Any]) -> Table:
    head = ("mesh", "peak GB", "GB between nodes", "GB through a card", "compute s", "gathering s", "travel s")
    found = [(label(plans[TEN], mesh), *cells(mesh)[1:]) for mesh in plans[TEN]["meshes"]]
    return (*head, "optimizer s", "update s"), [[first, peak, *rest] for first, peak, _, *rest in found]


def recipe_table(plans: Mapping[str, Any]) -> Table:
    head = ("recipe", "recommended", "peak GB", "GB between nodes", "update s", "GPU hours of all updates")
    rows = []
    for key in (key for key in wanted() if key in plans and "|" not in key):
        best, fsdp = taken(plans[key]), plans[key]["meshes"][0]
        hours = lo.load_config(key).train.steps * best["seconds"]["total"] * GPUS / 3600
        rows.append([key.removeprefix("paper/"), *_short(best), f"{hours:,.0f}", *_short(fsdp)[1:]])
    return (*head, "FSDP 64: peak GB", "GB between nodes", "update s"), rows


def _short(mesh: Mapping[str, Any]) -> list[str]:
    row = cells(mesh)
    return [row[0], row[1], row[3], row[-1]]


def layer_table(plans: Mapping[str, Any]) -> Table:
    """Between nodes, by block: what FSDP gathers and reduces there in an update, and how many times less it is."""
    first, rows = None, []
    for mesh in plans[TEN]["meshes"]:
        sizes = layer_bytes(mesh)
        first = first or sizes
        rows.append(
            [name(mesh["mesh"]), *(f"{size / 1e9:.3f} ({first[i] / size:.1f})" for i, size in enumerate(sizes))]
        )
    return ("mesh", "a looped MoE layer", "another MoE layer", "the optimizer, all layers", "the whole update"), rows


def layer_bytes(mesh: Mapping[str, Any]) -> list[float]:
    """Between nodes: the mean over looped and over other blocks with experts, the optimizer, and all of an update."""
    model = lo.load_config(TEN).model
    blocks = {True: [], False: []}
    for block, visits in enumerate(Layout.of(model).visits):
        if block >= model.dense_layers:
            blocks[visits > 1].append(mesh["bytes_between_nodes_by_module"][f"blocks.{block}"])
    means = [sum(sizes) / len(sizes) for sizes in (blocks[True], blocks[False])]
    return [*means, mesh["bytes_between_nodes_by_module"][STEP], mesh["bytes_between_nodes"]]


def case_table(plans: Mapping[str, Any]) -> Table:
    """The best mesh with gathered experts beside the best one with spread experts."""
    head = ("what", "gathered: peak GB", "gathering s", "update s", "spread: peak GB", "travel s", "update s")
    rows = []
    for what, case in CASES.items():
        if key_of(*case) not in plans:
            continue
        answer = plans[key_of(*case)]
        row = [f"{what} ({case[0].removeprefix('paper/')})"]
        for spread in (False, True):
            some = [mesh for mesh in answer["meshes"] if (mesh["mesh"]["expert"] > 1) == spread]
            best = min(some, key=lambda mesh: (not mesh["fits"], mesh["seconds"]["total"]))
            seconds, peak = best["seconds"], f"{best['memory_gb']['peak']:.1f}"
            row += [peak if best["fits"] else f"{peak}, too much"]
            row += [f"{seconds['tokens that travel' if spread else 'gathering']:.2f}", f"{seconds['total']:.2f}"]
        rows.append([*row, name(answer["recommended"])])
    return (*head, "recommended"), rows


TABLES = {
    "memory": memory_table,
    "meshes": mesh_table,
    "recipes": recipe_table,
    "layers": layer_table,
    "cases": case_table,
}


def write_tables(page: str, plans: Mapping[str, Any]) -> str:
    """The page with its tables replaced: the rows after each `<!-- plans: NAME -->`."""
    for key, table in TABLES.items():
        head, rows = table(plans)
        lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
        pattern = rf"(<!-- plans: {key} -->\n\n)(\|.*\n)*\n*"
        assert re.search(pattern, page), f"the page has no place for the table {key!r}"
        page = re.sub(pattern, lambda found, lines=lines: found[1] + "\n".join(lines) + "\n\n", page)
    return page


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
    given.page.write_text(write_tables(given.page.read_text(), plans))


if __name__ == "__main__":
    main()
