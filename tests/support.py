"""What several test modules share: the command line as a process, a tiny recipe, the losses of a run."""

import base64
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

from looptim.config import Config, ModelConfig

LOOPTIM = str(Path(sys.executable).with_name("looptim"))
RECIPES = Path(__file__).parents[1] / "src" / "looptim" / "recipes"
REPO = Path(__file__).parents[1]
STUDIES = REPO / "src" / "looptim" / "studies"
PAPER_TABLES = json.loads((Path(__file__).parent / "paper_tables.json").read_text())
"""The numbers of the paper's results tables."""


def run(*arguments, **options):
    """`looptim ARGUMENTS` in a process of its own."""
    return subprocess.run([LOOPTIM, *arguments], capture_output=True, text=True, **{"timeout": 120} | options)


def config(model=None, data=None, optim=None, **train) -> Config:
    """A recipe of twelve updates of the tiny model, on two-digit addition."""
    return Config(
        model=ModelConfig.tiny(**(model or {})),
        data={"source": "synthetic:addition", "options": {"digits": 2}, **(data or {})},
        optim={"lr": 3e-3, "min_lr": 3e-4, "warmup": 2, **(optim or {})},
        train={
            "steps": 12,
            "seq_len": 32,
            "batch_size": 4,
            "log_every": 1,
            "valid_every": 6,
            "valid_batches": 2,
            "checkpoint_every": 3,
            **train,
        },
    )


def packed(page) -> dict:
    """The data that is packed into a page."""
    data = re.search(r'<script id="data"[^>]*>([^<]*)</script>', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(data)))


def losses(run, key="loss") -> dict[int, float]:
    """The numbers called `key` that a run logged, by step."""
    lines = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def run_training(processes, recipe, out, *extra):
    """`looptim train` as a user starts it, on this many processes."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
        if processes > 1
        else ["-m"]
    )
    command = [sys.executable, *launch, "looptim", "train", str(recipe), "--out", str(out), "--no-export", *extra]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
