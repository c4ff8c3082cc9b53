"""What looptim does, in a minute: the zoo of transitions, a mismatch found, removed and checked."""

import torch

import looptim as lo
from looptim.cli import zoo


def heading(text: str) -> None:
    print(f"\n== {text}")


def main() -> None:
    torch.manual_seed(0)
    heading("Every transition of the paper, seen as an optimizer (looptim zoo)")
    zoo()

    heading('HyperLoop: what it is (looptim.describe(looptim.build("hyperloop", width=64, steps=3)))')
    hyperloop = lo.build("hyperloop", width=64, steps=3)
    print(lo.describe(hyperloop))

    heading("Does it write through the map it reads with? (looptim.diagnose)")
    print(lo.diagnose(hyperloop))

    heading("Is a step the gradient step of its local objective? (looptim.check_gradient)")
    try:
        lo.check_gradient(hyperloop)
    except ValueError as error:
        print(error)

    heading("Aligned (looptim.align): same modules, the separate write map dropped")
    aligned = lo.align(hyperloop)
    print(lo.diagnose(aligned))
    print(f"check_gradient: every step equals autograd's to {lo.check_gradient(aligned):.1e}")
    before, after = (sum(p.numel() for p in loop.parameters()) for loop in (hyperloop, aligned))
    print(f"transition parameters: {before:,} before, {after:,} after")

    heading("OperLoop at work on random tokens (looptim.trace)")
    operloop = lo.build("operloop", width=64, steps=3)
    blocks = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
    with torch.no_grad(), lo.trace(operloop) as trace:
        operloop(torch.randn(2, 16, 64), blocks)
    for step, (eta, lam, value) in enumerate(zip(trace.step_size, trace.decay, trace.objective, strict=True)):
        print(f"loop {step}: step size {eta.mean():.3f}, decay {lam.mean():.3f}, local objective {value.mean():.2f}")


if __name__ == "__main__":
    main()
