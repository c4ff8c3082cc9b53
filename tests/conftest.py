"""Shared by all tests. The environment is set before the first operation of torch."""

import os

# Virtual machines may advertise AMX and not grant it; oneDNN then dies in the first bf16 matmul (docs/framework.md).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

# It runs beside the tests of transformers only.
collect_ignore = ["hf/common_suite.py"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
