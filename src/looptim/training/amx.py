"""A guard for CPUs that advertise AMX without permitting it, where the first bf16 matmul kills the process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from ..base.files import write_whole

VARIABLE = "ONEDNN_MAX_CPU_ISA"
PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum().item()"


def guard_bf16() -> None:
    """Keep oneDNN from using AMX if that kills the process; call this before torch's first operation.

    oneDNN reads the variable once. Where AMX works it is left alone, since bf16 without it is ten times slower.
    """
    if VARIABLE in os.environ or not _advertises_amx():
        return
    if not _amx_works():
        os.environ[VARIABLE] = "AVX512_CORE_BF16"


def _advertises_amx() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "amx_bf16" in cpuinfo.read_text()


def _amx_works() -> bool:
    """Try a bf16 matmul in a separate process, once per machine and boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = boot.read_text().strip() if boot.is_file() else "unknown"
    answer = Path(os.environ.get("LOOPTIM_CACHE") or "~/.cache/looptim").expanduser() / f"amx-{identity}"
    if answer.is_file():
        return answer.read_text() == "works"
    status = subprocess.run([sys.executable, "-c", PROBE], capture_output=True).returncode
    # Forbidden AMX ends in a signal; any other failure, such as a lack of memory, says nothing about AMX.
    if status <= 0:
        # With a read-only home, this costs one probe per run and nothing else.
        with contextlib.suppress(OSError):
            write_whole(answer, "works" if status == 0 else "dies")
    return status == 0
