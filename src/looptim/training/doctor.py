"""Whether this machine can run looptim: the first things to try, each with the result to expect."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .. import __version__
from ..config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from ..model import Experts, LoopedLM, Routing
from ..model.attention import causal_attention, document_starts, visible
from ..rundir import RunDir
from .amx import guard_bf16
from .distributed import World
from .optim import MuonAdamW, parameter_groups
from .peak import gemm_peak
from .step import TrainingState, update
from .train import train


class Skip(Exception):  # noqa: N818
    """Raised by a check that this machine has no hardware for."""


class Finding(NamedTuple):
    """What a check found; `ok` is None where there was nothing to try it on."""

    name: str
    ok: bool | None
    said: str


def examine() -> Iterator[Finding]:
    """Run every check, one after another; a failing check does not stop the others."""
    for name, check in CHECKS.items():
        try:
            yield Finding(name, True, check())
        except Skip as reason:
            yield Finding(name, None, str(reason))
        except Exception as error:
            # Any failure here is a finding, not a crash.
            yield Finding(name, False, f"{type(error).__name__}: {error}".splitlines()[0])


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _need_gpu(count: int = 1) -> None:
    if torch.cuda.device_count() < count:
        raise Skip(f"needs {count} GPU{'s' * (count > 1)}, and there are {torch.cuda.device_count()}")


def _must(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)


def versions() -> str:
    """looptim, torch and the device."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"looptim {__version__}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, {name}"


def matmul() -> str:
    """The peak speed that utilization refers to."""
    if not torch.cuda.is_available():
        guard_bf16()
    speeds = {dtype: gemm_peak(_device(), dtype) for dtype in ("fp32", "bf16")}
    _must(min(speeds.values()) > 0, f"a matmul took no time: {speeds}")
    return ", ".join(f"{dtype} {speed / 1e12:.2f} TFLOP/s" for dtype, speed in speeds.items())


def attention() -> str:
    """Attention with windows and documents against an explicit mask."""
    device = _device()
    q, k, v = torch.randn(3, 2, 4, 192, 32, device=device).unbind()
    documents = (torch.arange(192, device=device) // 70).expand(2, -1)
    starts, places = document_starts(documents), torch.arange(192, device=device)
    worst = 0.0
    for window, begins in ((48, None), (None, starts), (48, starts)):
        seen = visible(window, begins)
        mask = torch.stack([seen(b, 0, places[:, None], places[None, :]) for b in torch.arange(2, device=device)])
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1))
        found = causal_attention(q, k, v, window=window, starts=begins)
        worst = max(worst, (found - expected).abs().max().item())
    _must(worst < 2e-2, f"attention differs from its definition by {worst:.2g}")
    return f"windows and documents are their definition to {worst:.1g}"


def experts() -> str:
    """Grouped experts against a plain loop over experts."""
    device = _device()
    part = Experts(64, experts=8, hidden=32).to(device)
    x, weights = torch.randn(256, 64, device=device), torch.rand(256, 2, device=device)
    chosen = torch.rand(256, 8, device=device).topk(2).indices
    with torch.no_grad():
        found = part(x, Routing(chosen, weights, weights))
        expected = torch.zeros_like(x)
        for number in range(8):
            share = (weights * (chosen == number)).sum(1, keepdim=True)
            expected += share * (F.silu(x @ part.gate[number].T) * (x @ part.up[number].T)) @ part.down[number].T
    error = ((found - expected).norm() / expected.norm()).item()
    _must(error < 2e-2, f"grouped experts differ from a plain loop by {error:.2g}")
    return f"grouped experts equal a plain loop to {error:.1g}"


def _recipe(**changes: Any) -> Config:
    """Six updates of the smallest model, on addition."""
    train = {"steps": 6, "seq_len": 32, "batch_size": 4, "log_every": 1, "valid_every": 6, "valid_batches": 1}
    return Config(
        model=ModelConfig.tiny(),
        data=DataConfig(source="synthetic:addition"),
        optim=OptimConfig(lr=3e-3, warmup=2),
        train=TrainConfig(**{**train, "checkpoint_every": 3, **changes}),
    )


def _losses(run: Path) -> list[float]:
    return [line["loss"] for line in RunDir(run).metrics.read() if "loss" in line]


def training() -> str:
    """Six updates; an interrupted and resumed run has the same losses."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _losses(train(_recipe(), Path(folder, "whole"), progress=False))
        train(_recipe(), Path(folder, "cut"), progress=False)
        for checkpoint in RunDir(Path(folder, "cut")).checkpoints()[1:]:
            (checkpoint / "checkpoint.json").unlink()
        again = _losses(train(_recipe(), Path(folder, "cut"), resume=True, progress=False))
    worst = max(abs(a - b) for a, b in zip(whole, again, strict=True))
    _must(whole[-1] < whole[0] and worst < 1e-3, f"losses {whole}, but {again} after an interruption")
    return f"loss {whole[0]:.3f} to {whole[-1]:.3f} in six updates; resumed, it differs by {worst:.1g}"


def mixed_precision() -> str:
    """bf16 follows fp32."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [_losses(train(_recipe(dtype=dtype), Path(folder, dtype), progress=False)) for dtype in ("fp32", "bf16")]
    worst = max(abs(a - b) / a for a, b in zip(*runs, strict=True))
    _must(worst < 0.02, f"bf16 is {worst:.1%} off fp32: {runs}")
    return f"bf16 follows fp32 within {worst:.1%}"


def compiling() -> str:
    """A compiled model has the same loss and gradient as an uncompiled one."""
    _need_gpu()
    config = _recipe()
    tokens = torch.randint(0, 256, (4, 32), device="cuda")
    found = []
    for compiled in (False, True):
        model = LoopedLM(config.model, seed=0).cuda()
        if compiled:
            model.compile_blocks()
        loss = model.loss(tokens, tokens).loss
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        found.append((loss.item(), norm.item()))
    worst = max(abs(a - b) / abs(a) for a, b in zip(*found, strict=True))
    _must(worst < 1e-2, f"compiled: {found[1]}, not compiled: {found[0]}")
    return f"loss and gradient differ by {worst:.1g}"


def waiting() -> str:
    """CUDA itself confirms that an update never makes the host wait."""
    _need_gpu()
    from ..data import open_data

    config, world = _recipe(), World(0, 1, torch.device("cuda"))
    data = open_data(config.data, vocab_size=257, seq_len=32, progress=False)
    model = LoopedLM(config.model, seed=0).cuda()
    run = TrainingState(config, RunDir("none"), world, data, model, MuonAdamW(parameter_groups(model, lr=1e-3)))
    update(run, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        done = update(run, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    values, _ = done.read()
    return f"an update read nothing; its loss, {values['loss']:.3f}, was read afterwards"


def processes() -> str:
    """Two processes have the losses of one, over NCCL on two GPUs or over gloo without GPUs."""
    if torch.cuda.is_available():
        _need_gpu(2)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "looptim"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "recipe.toml").write_text(_recipe().to_toml())
        one = _losses(train(_recipe(), Path(folder, "one"), progress=False))
        command = [*launch, "train", f"{folder}/recipe.toml", "--out", f"{folder}/two", "--no-export"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600)
        _must(done.returncode == 0, done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "they failed")
        two = _losses(Path(folder, "two"))
    worst = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
    _must(worst < 1e-3, f"one process {one}, two {two}")
    return f"two have the losses of one to {worst:.1g}"


def checkpoints() -> str:
    """How long a gigabyte of checkpoint takes here, which decides whether SIGTERM leaves enough time."""
    from .storage import write_tensors

    tensor = torch.zeros(2**26)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        start = time.perf_counter()
        write_tensors(Path(folder, "x.safetensors"), [("x", tensor.dtype, tensor.shape)], [tensor])
        seconds = time.perf_counter() - start
    return f"{tensor.nbytes / 1e9 / seconds:.2f} GB/s are written and hashed in this folder"


CHECKS: dict[str, Callable[[], str]] = {
    "versions": versions,
    "matmul": matmul,
    "attention": attention,
    "experts": experts,
    "training": training,
    "mixed precision": mixed_precision,
    "compiling": compiling,
    "waiting": waiting,
    "processes": processes,
    "checkpoints": checkpoints,
}
"""The checks, in an order in which later ones build on earlier ones; docs/gpu.md lists the expected output."""
