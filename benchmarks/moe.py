"""Routed experts against one dense SwiGLU with the same activated FLOPs, forward + backward.

    python benchmarks/moe.py [--quick] [--dtype bfloat16] [--compile]

Figures are ratios of medians inside one run; the variants take turns, so that a busy machine slows all alike.
Routing is random, without a router: the ratio is what dispatch and small matrices cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looptim.model import Experts, Routing, SwiGLU
from looptim.training.bench import medians

SHAPES = [(256, 64, 16, 4), (512, 128, 16, 4), (512, 128, 64, 8), (512, 64, 64, 8)]


class LoopedExperts(Experts):
    """The usual readable form: one boolean index per expert."""

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(self.gate.shape[0]):
            tokens, slots = (routing.indices == expert).nonzero(as_tuple=True)
            rows = x[tokens]
            hidden = F.silu(rows @ self.gate[expert].T) * (rows @ self.up[expert].T)
            weights = routing.weights[tokens, slots].unsqueeze(-1).to(x.dtype)
            y = y.index_add(0, tokens, hidden @ self.down[expert].T * weights)
        return y


def random_routing(tokens: int, experts: int, top_k: int, device: str) -> Routing:
    scores = torch.rand(tokens, experts, device=device)
    weights, indices = scores.topk(top_k)
    return Routing(indices, weights / weights.sum(-1, keepdim=True), scores)


def training_call(module: nn.Module, x: Tensor, *args: Routing) -> Callable[[], None]:
    grad, wanted = torch.randn_like(x), [x, *module.parameters()]

    def run() -> None:
        torch.autograd.grad(module(x, *args), wanted, grad)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, fewer tokens, three repeats")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="add a compiled column")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    shapes, repeats, tokens = (SHAPES[:3:2], 3, 1024) if options.quick else (SHAPES, 9, 4096)

    print(f"{device}, {options.dtype}, {torch.get_num_threads()} threads, {tokens} tokens")
    names = ["loop over experts", "looptim", *(["looptim, compiled"] if options.compile else [])]
    print("| width | expert | experts | top-k | dense, ms | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 5) + "|")
    for width, hidden, experts, top_k in shapes:
        x = torch.randn(tokens, width, dtype=dtype, device=device, requires_grad=True)
        routing = random_routing(tokens, experts, top_k, device)
        grouped = Experts(width, experts=experts, hidden=hidden).to(device, dtype)
        looped = LoopedExperts(width, experts=experts, hidden=hidden).to(device, dtype)
        calls = {
            "dense": training_call(SwiGLU(width, top_k * hidden).to(device, dtype), x),
            "loop over experts": training_call(looped, x, routing),
            "looptim": training_call(grouped, x, routing),
        }
        if options.compile:
            torch._dynamo.reset()
            compiled = torch.compile(grouped, fullgraph=True)
            assert isinstance(compiled, nn.Module)
            calls["looptim, compiled"] = training_call(compiled, x, routing)
        time_of = medians(calls, repeats, device)
        base = time_of.pop("dense")
        ratios = " | ".join(f"{value / base:.2f}" for value in time_of.values())
        print(f"| {width} | {hidden} | {experts} | {top_k} | {base * 1e3:.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
