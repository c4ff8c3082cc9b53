"""The peak speed of this machine, measured when it is needed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock(device: str) -> Callable[[], float]:
    """The clock of a benchmark: with one thread on a CPU this process's own time, which others hardly disturb."""
    return time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def gemm_peak(device: torch.device, dtype: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """FLOP/s of a large matmul in the run's dtype, measured here and now; MFU is a share of it."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return 2 * size**3 / best
