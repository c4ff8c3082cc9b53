"""What looptim does, in a few minutes: the zoo, a mismatch found and removed, two models trained, one looked into."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch

from ..base.console import print_table
from ..data import Tokenizer
from ..generation import generate
from ..loading import load
from ..loop import align, build, check_gradient, describe, diagnose
from ..loop.depth import Fixed
from ..loop.table import COLUMNS, FOOTNOTE, cells, zoo
from ..model import LoopedLM
from ..recipe import load_config
from ..rundir import RunDir
from ..training.train import train
from .look import look
from .report import report

STEPS = 60
PRESETS = {"operloop": ["loop.options.shared=true"], "vanilla": []}
"""What is trained; all loops of this OperLoop share one transition, so that its depth can be varied afterwards."""
TEXT = "def read(self, name):\n    with open(name) as file:\n        return file.read()\n"


def demo(out: str | Path = "runs/demo") -> Path:
    """Show the zoo, find and remove a mismatch, train two looped models, and look into one; the path of that page."""
    out = Path(out)
    torch.manual_seed(0)
    _show_transitions()
    start = time.perf_counter()
    runs = [_train(preset, out / preset) for preset in PRESETS]
    _say(f"Validation losses on the Python standard library, after {time.perf_counter() - start:.0f} s")
    for run in runs:
        print(f"{run.name}: {RunDir(run).read().column('valid_loss')[1][-1]:.4f} nats per token")
    model, tokenizer = load(runs[0])
    _say("All loops of this OperLoop share one transition, so you can choose the number of loops after training")
    print_table(["loops", "loss on a text it has not seen"], _by_depth(model, tokenizer))
    _say(f"A sample (looptim generate {runs[0]} 'def '); after so short a training, expect nonsense")
    print("def " + generate(model, tokenizer, "def ", max_new_tokens=60, seed=0))
    _say(f"The report (looptim report {' '.join(map(str, runs))} --out {out}/report)")
    print(report(runs, out / "report"))
    _say(f"What OperLoop predicts, loop by loop (looptim look {runs[0]} TEXT --against {runs[1]})")
    page = look(runs[0], TEXT, against=runs[1], out=out / "look.html").path
    print(f"open {page} in a browser")
    assert page is not None
    return page


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _show_transitions() -> None:
    _say("Every transition of the paper as an optimizer (looptim zoo)")
    print_table(list(COLUMNS.values()), [cells(row) for row in zoo()])
    print(FOOTNOTE)
    _say("HyperLoop: does it read and write the same map? (looptim diagnose hyperloop)")
    hyperloop = build("hyperloop", width=64, steps=3)
    print(describe(hyperloop))
    print(diagnose(hyperloop))
    _say("Aligned (looptim.align): the same modules without the separate write map")
    aligned = align(hyperloop)
    print(diagnose(aligned))
    print(f"check_gradient: every step equals autograd's to {check_gradient(aligned):.1e}")
    before, after = (sum(p.numel() for p in loop.parameters()) for loop in (hyperloop, aligned))
    print(f"transition parameters: {before:,} before, {after:,} after")


def _train(preset: str, folder: Path) -> Path:
    if RunDir(folder).config_file.is_file():
        shutil.rmtree(folder)
    changes = [f"loop.preset={preset}", *PRESETS[preset], f"train.steps={STEPS}", f"train.valid_every={STEPS}"]
    _say(f"Training {preset} for {STEPS} updates: looptim train nano --set loop.preset={preset} ...")
    # Half of the recipe's batch, so that the whole tour, installation included, takes less than four minutes.
    return train(load_config("nano", set=[*changes, "train.batch_size=8", "optim.warmup=20"]), folder)


def _by_depth(model: LoopedLM, tokenizer: Tokenizer) -> list[list[str]]:
    """The loss at one to six loops of this file, which is in no training text."""
    ids = torch.tensor([tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))[: model.config.max_length]])
    rows = []
    for loops in range(1, 7):
        with torch.no_grad():
            loss = model.loss(ids[:, :-1], ids[:, 1:], depth=Fixed(loops)).cross_entropy
        rows.append([str(loops), f"{loss.item():.4f}"])
    return rows
