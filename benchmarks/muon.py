"""An optimizer step as a share of forward + backward, on small looped MoE models.

    python benchmarks/muon.py [--quick] [--compile]

Figures are ratios of medians inside one run; the variants take turns, so that a busy machine slows all alike.
`plain` orthogonalizes one matrix at a time by the definition; `batched` takes equal shapes together; `batched, Gram`
is what looptim does. The cost of a step does not depend on the tokens: larger batches hide it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from looptim.config import ModelConfig
from looptim.model.lm import LoopedLM
from looptim.training.bench import medians
from looptim.training.optim import MuonAdamW, muon, parameter_groups, polar

SHARED: dict[str, Any] = {
    "layout": "2-2x3-2",
    "vocab_size": 4096,
    "max_length": 512,
    "dense_layers": 2,
    "loop": {"preset": "operloop"},
}
MODELS: list[dict[str, Any]] = [
    {"width": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "window": 64, "sliding_rotary": 32, "full_rotary": 16}
    | {"dense_hidden": 384, "experts": 8, "top_k": 2, "expert_hidden": 96, "shared_hidden": 96},
    {"width": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "window": 128, "sliding_rotary": 64, "full_rotary": 32}
    | {"dense_hidden": 768, "experts": 16, "top_k": 4, "expert_hidden": 64, "shared_hidden": 128},
    {"width": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "window": 128, "sliding_rotary": 64, "full_rotary": 32}
    | {"dense_hidden": 1536, "experts": 16, "top_k": 4, "expert_hidden": 128, "shared_hidden": 256},
]


def no_gram(X: torch.Tensor) -> bool:
    return False


def variants(model: LoopedLM) -> dict[str, Callable[[], None]]:
    """A step of each optimizer, at rate zero so that the model stays what it is."""
    adamw = MuonAdamW(parameter_groups(model, lr=0.0, matrices="adamw"))
    optimizer = MuonAdamW(parameter_groups(model, lr=0.0))

    def one_by_one() -> None:
        with (
            mock.patch.object(polar, "CACHED_NUMEL", 1),
            mock.patch.object(muon, "BATCHED_NUMEL", 1),
            mock.patch.object(polar, "gram_pays", no_gram),
        ):
            optimizer.step()

    def batched() -> None:
        with mock.patch.object(polar, "gram_pays", no_gram):
            optimizer.step()

    return {
        "AdamW alone": adamw.step,
        "Muon, plain": one_by_one,
        "Muon, batched": batched,
        "Muon, batched, Gram": optimizer.step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model, fewer tokens, three repeats")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of the model")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models, repeats, batch, length = (MODELS[:1], 3, 2, 256) if options.quick else (MODELS, 7, 8, 512)

    print(f"{device}, fp32, {torch.get_num_threads()} threads, {batch * length} tokens a step")
    print("| parameters | by Muon | forward + backward, ms | AdamW alone | Muon, plain | batched | batched, Gram |")
    print("|---" * 7 + "|")
    for sizes in models:
        model = LoopedLM(ModelConfig(**SHARED, **sizes), seed=0).to(device)
        if options.compile:
            model.compile_blocks()
        tokens = torch.randint(SHARED["vocab_size"], (batch, length), device=device)

        def forward_backward(model: LoopedLM = model, tokens: torch.Tensor = tokens) -> None:
            model.zero_grad()
            model.loss(tokens, tokens.roll(-1, dims=1)).loss.backward()

        time_of = medians({"forward + backward": forward_backward, **variants(model)}, repeats, device)
        base = time_of.pop("forward + backward")
        groups = parameter_groups(model, lr=0.0)
        total, by_muon = (
            sum(p.numel() for g in groups if g["kind"] in kinds for p in g["params"]) / 1e6
            for kinds in (("muon", "adamw"), ("muon",))
        )
        shares = " | ".join(f"{100 * value / base:.1f}%" for value in time_of.values())
        print(f"| {total:.1f} M | {by_muon:.1f} M | {base * 1e3:.0f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
