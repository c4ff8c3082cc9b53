"""What a transition costs: time, FLOPs and parameters of a training step, relative to the vanilla loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch

from ..base.code import allow
from ..base.console import Progress
from ..base.markup import Answer
from ..base.memory import keep_memory
from ..config import Config, ModelConfig, TrainConfig
from ..loop import Loop
from ..model import LoopedLM
from ..model.count import Count, count
from .amx import guard_bf16
from .peak import clock, gemm_peak

PRESETS = ("huginn", "parcae", "hyperloop", "operloop", "operloop_nesterov", "operloop_muon", "operloop_bounded")
"""One of each kind of work: no parameters, a dense map, streams, the delta objective, other rules, another read."""

MODEL: dict[str, Any] = {"layout": "0-4x3-0", "width": 256, "vocab_size": 256, "max_length": 512, "heads": 8}
MODEL |= {"kv_heads": 2, "head_dim": 32, "window": 128, "sliding_rotary": 32, "full_rotary": 16}
MODEL |= {"dense_layers": 4, "dense_hidden": 1024, "loop": {"preset": "vanilla"}}
TRAIN: dict[str, Any] = {"batch_size": 4, "seq_len": 512}

COLUMNS = ("transition", "time", "quartiles", "FLOPs", "parameters", "MFU", "form")


def bench(names: str | Iterable[str] = (), config: Config | None = None, *, repeats: int = 9) -> Answer:
    """Forward and backward of transitions around the same blocks, as ratios to the vanilla loop.

    Args:
      names: presets, your own (`file.py:function`) included; one of each kind by default.
      config: whose model, micro-batch, dtype and compilation are measured; four dense blocks of width 256 looped three
        times by default. Options of its transition hold for that preset only.
      repeats: rounds. The transitions take turns, so that a slow moment of the machine falls on all of them.

    Returns:
      What was measured on, and a row per transition: `time`, the median over rounds of its time over vanilla's in the
      same round, with the quartiles; `flops` and `parameters` of the model over vanilla's; `mfu`.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    config = Config(model=ModelConfig(**MODEL), train=TrainConfig(**TRAIN)) if config is None else config
    if not any(segment.loops for segment in config.model.segments):
        raise ValueError(f"layout {config.model.layout!r} has no looped segment; bench compares loops")
    if config.train.dtype == "bf16" and not torch.cuda.is_available():
        guard_bf16()
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        allow(name)
    settings = config.train
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    configs = {name: _with_preset(config, name) for name in dict.fromkeys(["vanilla", *(names or PRESETS)])}
    rows_per_step = min(settings.micro_batch or settings.batch_size, settings.batch_size)
    tokens = torch.randint(config.model.vocab_size, (rows_per_step, settings.seq_len), device=device)

    def training_call(model: LoopedLM) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bf16"):
                loss = model.loss(tokens, tokens).loss
            loss.backward()

        return run

    models = _models(configs, device)
    times = rounds({name: training_call(model) for name, model in models.items()}, repeats, device.type)
    peak = gemm_peak(device, settings.dtype, clock(device.type))
    counts = {name: count(c) for name, c in configs.items()}
    rows = [_row(name, times, counts, tokens.numel() / peak) | {"form": form(models[name])} for name in configs]
    answer = {
        "model": f"layout {config.model.layout}, width {config.model.width}, {settings.dtype}"
        + (", compiled" if settings.compile else ""),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "tokens": tokens.numel(),
        "repeats": repeats,
        "gemm_peak": peak,
        "seconds": statistics.median(turn["vanilla"] for turn in times),
        "rows": rows,
    }
    return Answer(answer, head=COLUMNS, rows=list(map(cells, rows)))


def _row(name: str, times: list[dict[str, float]], counts: Mapping[str, Count], tokens_per_peak: float) -> dict:
    low, middle, high = quartiles([turn[name] / turn["vanilla"] for turn in times])
    ratios = counts[name].ratios(counts["vanilla"])
    training_flops = 3 * sum(counts[name].flops.values())
    return {
        "name": name,
        "time": middle,
        "time_quartiles": [low, high],
        "flops": ratios["flops"]["total"],
        "parameters": ratios["parameters"]["total"],
        "mfu": training_flops * tokens_per_peak / statistics.median(turn[name] for turn in times),
    }


def form(model: LoopedLM) -> str:
    """The form in which a model's transitions run: fused, compiled or readable."""
    return ", ".join(dict.fromkeys(cast(Loop, loop).form for loop in model.loops))


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the strings of `COLUMNS`."""
    low, high = row["time_quartiles"]
    ratios = [f"{row[key]:.3f}" for key in ("flops", "parameters")]
    return [row["name"], f"{row['time']:.3f}", f"{low:.2f} to {high:.2f}", *ratios, f"{row['mfu']:.1%}", row["form"]]


def _with_preset(config: Config, name: str) -> Config:
    loop = config.model.loop
    values = config.model_dump()
    values["model"]["loop"] = loop.model_dump() if name == loop.preset else {"preset": name}
    return Config(**values)


def _models(configs: Mapping[str, Config], device: torch.device) -> dict[str, LoopedLM]:
    """One model per transition around the very same blocks, which are kept and compiled once."""
    models: dict[str, LoopedLM] = {}
    shared = LoopedLM(configs["vanilla"].model, seed=0)
    if configs["vanilla"].train.compile:
        shared.compile_blocks()
    for name, config in configs.items():
        model = LoopedLM(config.model, seed=0)
        for part in ("embedding", "blocks", "norm", "head"):
            setattr(model, part, getattr(shared, part))
        model.checkpointing = config.train.activation_checkpointing
        if config.train.compile:
            for loop in model.loops:
                cast(Loop, loop).set_form("compiled")
        if config.train.reversible and name != "vanilla":
            model.reverse_loops()
        models[name] = model.to(device)
    return models


def rounds(variants: Mapping[str, Callable[[], Any]], repeats: int, device: str) -> list[dict[str, float]]:
    """The seconds of each variant in each of `repeats` rounds, after a warm-up round, by `clock`."""
    keep_memory()
    for run in variants.values():
        _seconds(run, device)
    times = []
    with Progress("measuring", repeats) as progress:
        for _ in range(repeats):
            times.append({name: _seconds(run, device) for name, run in variants.items()})
            progress.advance()
    return times


def medians(variants: Mapping[str, Callable[[], Any]], repeats: int, device: str) -> dict[str, float]:
    """The median seconds of each variant over the rounds."""
    times = rounds(variants, repeats, device)
    return {name: statistics.median(turn[name] for turn in times) for name in variants}


def _seconds(run: Callable[[], Any], device: str) -> float:
    now = clock(device)
    start = now()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return now() - start


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The quartiles of some values, with the median in the middle."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    return cast(tuple[float, float, float], tuple(statistics.quantiles(values, n=4, method="inclusive")))
