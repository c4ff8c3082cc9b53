"""Where the time of a decode step goes, batch 1: generate, the forward alone, and its operations alone.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py [--repeats N]

The operations of one step are recorded and called again from a list, so that no module, no cache and no generation is
between them: what remains of a step is Python's.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from looptim import LoopedLM, load_config
from looptim.hf import LoopedForCausalLM, peers
from looptim.training.bench import rounds

TOKENS = 32


class Recorded(TorchDispatchMode):
    """The operations that were called, with what they were called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict[str, Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    config = load_config("small").model
    prompt = torch.randint(config.vocab_size, (1, 64))
    ours = LoopedForCausalLM.from_looped(LoopedLM(config, seed=0)).eval()
    models = {"OperLoop": ours, "Glm4Moe": peers.glm4_moe(config)}
    calls: dict[str, Any] = {}
    for name, model in models.items():
        cache = model(prompt, use_cache=True).past_key_values
        with Recorded() as seen:
            model(prompt[:, :1], past_key_values=cache, use_cache=True)
        calls |= {f"{name}, {what}": call for what, call in ways(model, prompt, cache, seen.calls).items()}
    times = rounds(calls, repeats, "cpu")
    print("| | ms a token |\n|---|---|")
    for name in calls:
        print(f"| {name} | {1e3 * statistics.median(turn[name] for turn in times) / TOKENS:.2f} |")


def ways(model: Any, prompt: torch.Tensor, cache: Any, operations: list[tuple]) -> dict[str, Any]:
    """`TOKENS` decode steps, three times less around them each."""
    length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}

    def forwards() -> None:
        for _ in range(TOKENS):
            model(prompt[:, :1], past_key_values=cache, use_cache=True)

    def replayed() -> None:
        for _ in range(TOKENS):
            for function, args, kwargs in operations:
                function(*args, **kwargs)

    return {"generate": lambda: model.generate(prompt, **length), "forward": forwards, "operations alone": replayed}


if __name__ == "__main__":
    main()
