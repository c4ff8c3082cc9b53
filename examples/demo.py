"""What looptim does, in a few minutes: the zoo, a mismatch found and removed, and two looped models trained."""

import shutil
import sys
import time
from pathlib import Path

import torch

import looptim as lo
from looptim.cli import zoo
from looptim.rundir import RunDir

RECIPE = "nano"
RUNS = Path("runs") / "demo"
STEPS = 80


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def look_at_transitions() -> None:
    heading("Every transition of the paper, seen as an optimizer (looptim zoo)")
    zoo()
    heading("HyperLoop: does it write through the map it reads with? (looptim diagnose hyperloop)")
    hyperloop = lo.build("hyperloop", width=64, steps=3)
    print(lo.describe(hyperloop))
    print(lo.diagnose(hyperloop))
    heading("Aligned (looptim.align): same modules, the separate write map dropped")
    aligned = lo.align(hyperloop)
    print(lo.diagnose(aligned))
    print(f"check_gradient: every step equals autograd's to {lo.check_gradient(aligned):.1e}")
    before, after = (sum(p.numel() for p in loop.parameters()) for loop in (hyperloop, aligned))
    print(f"transition parameters: {before:,} before, {after:,} after")


def train(preset: str) -> Path:
    out = RUNS / preset
    shutil.rmtree(out, ignore_errors=True)
    overrides = [f"loop.preset={preset}", f"train.steps={STEPS}", f"train.valid_every={STEPS}", "optim.warmup=20"]
    heading(f"Training {preset} for {STEPS} updates: looptim train nano --set loop.preset={preset} ...")
    return lo.train(lo.load_config(RECIPE, set=overrides), out)


def main() -> None:
    torch.manual_seed(0)
    look_at_transitions()
    start = time.perf_counter()
    runs = [train(preset) for preset in ("operloop", "vanilla")]
    heading(f"Validation losses on the Python standard library, after {time.perf_counter() - start:.0f} s")
    for run in runs:
        print(f"{run.name}: {RunDir(run).read().column('valid_loss')[1][-1]:.4f} nats per token")
    heading("A sample (looptim generate runs/demo/operloop 'def '); so short a training gives no sense yet")
    model, tokenizer = lo.load(runs[0])
    print("def " + lo.generate(model, tokenizer, "def ", max_new_tokens=60, seed=0))
    heading("The report (looptim report runs/demo/operloop runs/demo/vanilla --out runs/demo/report)")
    print(lo.report(runs, RUNS / "report"))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("demo: stopped", file=sys.stderr)
        sys.exit(130)
