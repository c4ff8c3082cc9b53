"""A study on a cluster: its runs as an array of SLURM jobs, and its tables as a job that comes after them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..base.files import check_writable, write_whole
from ..config import Config
from .archive import ARCHIVE, unpack
from .grid import is_settled, train_cell
from .run import check_folder
from .spec import Cell, load_plan

FOLDER = "slurm"
"""What was submitted, and what the jobs printed, within a study's folder."""


def submit(
    path: str | Path,
    out: str | Path,
    *,
    scale: str | None = None,
    set: Iterable[str] = (),
    only: Iterable[str] = (),
    runs: str | Path | None = None,
    jobs: int = 1,
    sbatch: Sequence[str] = (),
) -> list[str]:
    """Submit the missing runs of a study, `jobs` at a time, then the job that writes its tables; returns job ids.

    The second job is the same study without a launcher: it finds the runs, and trains what an array job did not end.
    """
    plan, out, changes = load_plan(path, scale=scale, set=set, only=only), Path(out).resolve(), list(set)
    if plan.study.tune is not None:
        raise ValueError(
            f"{path} tunes before it compares, and an array knows its runs beforehand; run it without --launcher"
        )
    folder = out / "runs" if runs is None else Path(runs).resolve()
    check_folder(out, plan)
    for place in (out, folder):
        check_writable(place)
    unpack(plan, out / ARCHIVE, folder)
    waiting = [cell for cell in {cell.name: cell for cell in plan.cells}.values() if not is_settled(cell, folder)]
    again = [sys.executable, "-m", "looptim", "study", str(path), "--out", str(out), "--runs", str(folder)]
    again += [] if scale is None else ["--scale", scale]
    again += [text for change in changes for text in ("--set", change)]
    again += [text for pattern in only for text in ("--only", pattern)]
    ids = []
    if waiting:
        cells = [
            {"variant": c.variant, "seed": c.seed, "code": c.code, "config": c.config.model_dump(mode="json")}
            for c in waiting
        ]
        listed = out / FOLDER / "runs.json"
        write_whole(listed, json.dumps({"runs": str(folder), "cells": cells}, indent=2))
        train = f"{shlex.join([sys.executable, '-m', __spec__.name, str(listed)])} $SLURM_ARRAY_TASK_ID"
        array = f"--array=0-{len(waiting) - 1}%{jobs}"
        ids.append(_sbatch(out / FOLDER / "runs.sh", train, [*sbatch, array]))
    after = [f"--dependency=afterany:{ids[0]}"] if ids else []
    ids.append(_sbatch(out / FOLDER / "tables.sh", shlex.join(again), [*sbatch, *after]))
    return ids


def _sbatch(script: Path, command: str, options: Sequence[str]) -> str:
    """Write a script that runs a command, and submit it; returns the job's id."""
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), f"#SBATCH --output={script.parent}/%x-%j.log"]
    # A job that is about to be stopped saves first: the signal goes to the command, which replaces the shell.
    lines += ["#SBATCH --signal=B:TERM@120", f"exec {command}"]
    write_whole(script, "\n".join(lines) + "\n")
    try:
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    except OSError:
        raise ValueError("--launcher slurm needs sbatch, which is not here; give it where SLURM is") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise ValueError(f"sbatch refused {script}: {reason}; change --sbatch to what your cluster wants")
    return done.stdout.strip().partition(";")[0]


def train_one(file: Path, index: int) -> None:
    """The work of one job of the array."""
    listed = json.loads(file.read_text())
    cell = listed["cells"][index]
    train_cell(Cell(**{**cell, "config": Config(**cell["config"])}), Path(listed["runs"]))


if __name__ == "__main__":
    train_one(Path(sys.argv[1]), int(sys.argv[2]))
