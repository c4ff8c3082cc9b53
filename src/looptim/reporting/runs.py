"""Run directories: their metrics by step, their config, and their names."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Run:
    """What a run directory says: its lines merged by step, and its config."""

    name: str
    lines: list[dict[str, Any]]
    config: dict[str, Any]
    files: dict[str, str]
    """The text of config.toml and env.json."""

    @property
    def preset(self) -> str:
        """The transition's name, or the run's where no config tells."""
        return self.config.get("loop.preset") or self.config.get("model.loop.preset") or self.name

    @property
    def loops(self) -> list[int]:
        """How often each looped segment runs, as far as a config tells."""
        return [int(times) for times in re.findall(r"x(\d+)", str(self.config.get("model.layout", "")))]

    def column(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and the numbers called `key`, from the lines that have one; null is NaN."""
        lines = [line for line in self.lines if key in line]
        values = [math.nan if line[key] is None else line[key] for line in lines]
        return np.array([line["tokens"] for line in lines], float), np.array(values, float)

    def columns(self, key: str, layer: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and the lists called `key` as (lines, entries), NaN where the number of loops varies."""
        lists = [line.get(key) if layer is None else line.get(key, {}).get(layer) for line in self.lines]
        pairs = [(line["tokens"], values) for line, values in zip(self.lines, lists, strict=True) if values]
        table = np.full((len(pairs), max((len(values) for _, values in pairs), default=0)), math.nan)
        for row, (_, values) in zip(table, pairs, strict=True):
            row[: len(values)] = [math.nan if value is None else value for value in values]
        return np.array([tokens for tokens, _ in pairs], float), table


NUMBERS = ("tokens", "loss", "valid_loss", "lr", "grad_norm", "tokens_per_s", "mfu")
FILES = ("config.toml", "env.json")
LISTS = ("step_size", "decay", "state_norm", "objective")


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in `folders`, under names that tell them apart."""
    return [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        twice = next(str(f) for f, part in zip(folders, parts, strict=True) if parts.count(part) > 1)
        raise ValueError(f"the run {twice!r} is given twice; give each run once")
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def read_run(folder: str | Path, name: str | None = None) -> Run:
    """The run in `folder`. A partial last line, which a killed run leaves, is ignored."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"there is no run directory {str(folder)!r}; give the folder that `looptim train` wrote")
    files = {file: (folder / file).read_text("utf-8", "replace") for file in FILES if (folder / file).is_file()}
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file() and "config.toml" not in files:
        raise ValueError(f"{folder} is not a run, it has no metrics.jsonl; give the folder that `looptim train` wrote")
    lines = _merge(metrics) if metrics.is_file() else []
    if not lines:
        raise ValueError(f"{folder} has no metrics yet; wait for the run's first logged step")
    try:
        config = _flatten(tomllib.loads(files.get("config.toml", "")))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{folder / 'config.toml'} is not valid TOML: {error}; repair it") from None
    return Run(name or folder.resolve().name, lines, config, files)


def _merge(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics file, one per step. A step that goes back is a resumed run, whose new lines count."""
    records: dict[int, dict[str, Any]] = {}
    last = -1
    *complete, tail = path.read_bytes().split(b"\n")
    for number, text in enumerate([*complete, tail], 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except ValueError:
            if number > len(complete):
                break
            raise ValueError(f"{path} line {number} is not JSON: {_short(text)}; repair or remove the line") from None
        wrong = _what_is_wrong(record)
        if wrong:
            raise ValueError(f"{path} line {number}: {wrong}, got {_short(text)}; repair or remove the line")
        step = record["step"]
        if step < last:
            records = {earlier: line for earlier, line in records.items() if earlier < step}
        records[step] = {**records.get(step, {}), **record}
        last = step
    return list(records.values())


def _what_is_wrong(record: Any) -> str | None:
    if not isinstance(record, dict):
        return "metrics must be an object"
    if not isinstance(record.get("step"), int) or record.get("tokens") is None:
        return "a line needs the numbers 'step' and 'tokens'"
    for key in NUMBERS:
        if not _is_number(record.get(key)):
            return f"{key!r} must be a number"
    for key in LISTS:
        if not _is_list(record.get(key, [])):
            return f"{key!r} must be a list of numbers"
    loads = record.get("moe_load", {})
    if not isinstance(loads, dict) or not all(map(_is_list, loads.values())):
        return "'moe_load' must map layers to lists of numbers"
    return None


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _short(text: bytes) -> str:
    return repr(text[:60].decode(errors="replace")) + ("..." if len(text) > 60 else "")


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
