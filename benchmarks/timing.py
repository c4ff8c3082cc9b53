"""How the benchmarks take their times: all variants in turn, so that a slow moment of the machine falls on all."""

import statistics
import time
from collections.abc import Callable

import torch


def medians(variants: dict[str, Callable[[], None]], repeats: int, device: str) -> dict[str, float]:
    """The median seconds of each variant over `repeats` rounds, after one round to warm up."""
    for run in variants.values():
        seconds(run, device)
    times = [{name: seconds(run, device) for name, run in variants.items()} for _ in range(repeats)]
    return {name: statistics.median(turn[name] for turn in times) for name in variants}


def seconds(run: Callable[[], None], device: str) -> float:
    """What one call takes, the device's work included."""
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
