"""Sliding-window attention against full causal attention at the same length, forward + backward.

    python benchmarks/window_attention.py [--quick] [--dtype bfloat16] [--compile]

Figures are ratios of medians inside one run; the variants take turns, so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from looptim.model import causal_attention
from looptim.training.bench import medians

SHAPES = [(512, 128), (1024, 32), (2048, 128), (4096, 128), (4096, 512)]
HEADS, KV_HEADS, DIM, TOKENS = 8, 2, 64, 4096


def full(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return causal_attention(q, k, v)


def boolean_mask(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    distance = i.unsqueeze(1) - i
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < window), enable_gqa=True)


def looptim(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return causal_attention(q, k, v, window=window)


def training_call(function: Callable, inputs: list[Tensor], window: int) -> Callable[[], None]:
    grad = torch.randn_like(inputs[0])

    def run() -> None:
        torch.autograd.grad(function(*inputs, window), inputs, grad)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, three repeats")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="add a compiled column")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes, repeats = (SHAPES[:3:2], 3) if options.quick else (SHAPES, 9)
    functions = {"full": full, "boolean mask": boolean_mask, "looptim": looptim}
    if options.compile:
        functions["looptim, compiled"] = torch.compile(looptim, dynamic=False)

    print(f"{device}, {options.dtype}, {torch.get_num_threads()} threads, {HEADS}/{KV_HEADS} heads of {DIM}")
    print("| T | W | full, ms | " + " | ".join(list(functions)[1:]) + " |")
    print("|---" * (len(functions) + 2) + "|")
    for length, window in shapes:
        inputs = [
            torch.randn(TOKENS // length, length, heads, DIM, dtype=getattr(torch, options.dtype), device=device)
            .transpose(1, 2)
            .requires_grad_()
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        calls = {name: training_call(function, inputs, window) for name, function in functions.items()}
        time_of = medians(calls, repeats, device)
        base = time_of.pop("full")
        ratios = " | ".join(f"{value / base:.2f}" for value in time_of.values())
        print(f"| {length} | {window} | {base * 1e3:.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
