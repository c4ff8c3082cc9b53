"""The peak speed of this machine, measured when it is needed."""

from __future__ import annotations

import time

import torch


def gemm_peak(device: torch.device, dtype: str) -> float:
    """FLOP/s of a large matmul in the run's dtype, measured here and now; MFU is a share of it."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
