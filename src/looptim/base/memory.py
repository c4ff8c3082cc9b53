"""How the C library hands out memory: what an update frees is kept for the next one."""

from __future__ import annotations

import ctypes
import functools
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3)."""


@functools.cache
def keep_memory() -> bool:
    """Keep freed memory in this process, where the C library is glibc; whether it does.

    By default glibc gives large tensors back to the system when they are freed, so that the next update pays a page
    fault for every 4 kB of them: up to a fifth of the time of a loop's transitions, which handle the widest tensors.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # 32 MB is the largest size that glibc allows to take from its heap.
    values = {MMAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 2**26}
    answers = [mallopt(name, value) for name, value in values.items()]
    return all(answer == 1 for answer in answers)
