"""Self-speculative decoding over plain decoding, batch 1: a run whose shared transition was trained at random depths.

    python benchmarks/speculative.py RUN [--prompt TEXT] [--loops N] [--tokens N] [--repeats N]

Figures are ratios of times inside one run; the variants take turns, so that a busy machine slows all alike. The texts
are compared: they must be the same.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

from looptim import load
from looptim.hf.speculative import Tally, speculate
from looptim.loading import wrap
from looptim.training.bench import quartiles, rounds

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--loops", type=int, help="loops of the model; its layout's by default")
    parser.add_argument("--draft", type=int, nargs="+", default=[1, 2], help="loops of the draft")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    model, tokenizer = load(options.run)
    with torch.inference_mode():
        wrapped = wrap(model, loops=options.loops)
        prompt = torch.tensor([tokenizer.encode(options.prompt)])
        print(f"layout {model.config.layout}, {torch.get_num_threads()} threads, {options.tokens} tokens")
        print("| | draft | tokens a round | speed over plain | quartiles | same text |")
        print("|---" * 6 + "|")
        for name, sampling in {"greedy": GREEDY, "sampled": SAMPLED}.items():
            measure(wrapped, prompt, name, sampling, options)


def measure(wrapped: Any, prompt: torch.Tensor, name: str, sampling: dict[str, Any], options: Any) -> None:
    """A row for every draft."""
    texts: dict[str, torch.Tensor] = {}
    tallies: dict[str, Tally] = {}

    def write(label: str, **method: Any) -> Callable[[], None]:
        def run() -> None:
            torch.manual_seed(0)
            length = {"max_new_tokens": options.tokens, "eos_token_id": None, "pad_token_id": 0}
            texts[label] = wrapped.generate(prompt, **length, **sampling, **method)

        return run

    calls = {"plain": write("plain")}
    for loops in options.draft:
        told = functools.partial(tallies.__setitem__, str(loops))
        method = functools.partial(speculate, draft_loops=loops, on_end=told)
        calls[str(loops)] = write(str(loops), custom_generate=method)
    times = rounds(calls, options.repeats, "cpu")
    for label, tally in tallies.items():
        low, median, high = quartiles([turn["plain"] / turn[label] for turn in times])
        same = "yes" if torch.equal(texts[label], texts["plain"]) else "NO"
        pace = (tally.tokens - 1) / tally.rounds
        print(f"| {name} | {label} loops | {pace:.2f} | {median:.2f} | {low:.2f} to {high:.2f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
