"""The run directory. This is the only module that knows a run's files, who may write them, and how to read them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import numpy as np

from .base.files import check_links, check_writable, claimed, os_errors_as, write_whole
from .base.lines import Lines
from .config import Config
from .data import Tokenizer
from .recipe import load_config


@final
class RunDir:
    """A run directory, given by its path, which need not exist yet."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config_file = self.path / "config.toml"
        """The file that makes a folder a run."""
        self.environment_file = self.path / "env.json"
        self.metrics = Lines(self.path / "metrics.jsonl", _check_metrics)
        self.samples = Lines(self.path / "samples.jsonl", _check_sample)
        """The texts the run wrote at its validations, if it was asked to."""
        self.tokenizer = self.path / "tokenizer"
        self.eval = self.path / "eval"
        self.model = self.path / "model"
        """The exported model, which transformers loads."""
        self.report = self.path / "report"
        self.diverged_file = self.path / "diverged.txt"
        """Why a run of a study was not completed."""
        self.hops_file = self.path / "hops.json"
        """What a run that learned a task of known difficulty solves, by loops and difficulty."""
        self.exits = Evaluation(self.eval, "exits")
        """What it costs and saves when tokens leave its loop early."""
        self.tracking_file = self.path / "tracking_id"
        self.tensorboard = self.path / "tensorboard"

    def config(self) -> Config:
        """The recipe of the run."""
        return load_config(self.config_file)

    def claim(self) -> AbstractContextManager[None]:
        """Hold the directory while training into it; a second process gets a HeldError."""
        return claimed(self.path)

    def check(self, config: Config, *, resume: bool, force: bool) -> None:
        """Check that the directory may be used for this config; nothing is written."""
        self.check_links()
        check_writable(self.path)
        known = self.config_file.is_file()
        if not resume and (known or any(self.path.glob("checkpoints/step_*"))):
            raise ValueError(f"{self.path} already holds a run; add --resume to continue it, or choose another --out")
        changes = difference(self.config(), config) if known else []
        if changes and not force:
            raise ValueError(f"the config of {self.path} has changed ({'; '.join(changes)}); undo that, or add --force")

    def record(self, config: Config, environment: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        """Write the run's description; config.toml comes last, since it is what makes the folder a run."""
        with os_errors_as(f"cannot write to {self.path}", "free some space, or choose another --out"):
            tokenizer.save(self.tokenizer)
            write_whole(self.environment_file, json.dumps(environment, indent=2))
            write_whole(self.config_file, config.to_toml())

    def checkpoint(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.path / "checkpoints" / f"step_{step:06d}"

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first; folders of other names are not ours."""
        found = [path.parent for path in self.path.glob(f"checkpoints/step_*/{RECORD}")]
        return sorted((path for path in found if re.fullmatch(r"step_\d{6,}", path.name)), key=step_of)

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(reversed(self.checkpoints()), None)

    def check_links(self) -> None:
        """Check that no link in the folder leads out of it; files are written and shown by these names."""
        inside = (*self.path.glob("*"), *self.path.glob("checkpoints/*"), *self.eval.glob("*"))
        check_links(self.path, [self.path, *inside])

    def evaluation(self, task: str, *, limit: int | None = None, loops: int | None = None) -> Evaluation:
        """The files of a task that is or will be evaluated on the run."""
        return Evaluation(self.eval, task, limit=limit, loops=loops)

    def evaluations(self) -> list[tuple[int | None, dict[str, Any]]]:
        """Every result, the newest last, with the number of loops it was run at, if one was given."""
        found = []
        files = set(self.eval.glob("*.json")) - {self.exits.result}
        for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name)):
            record = _read_object(file)
            if record is None or not _is_result(record):
                raise ValueError(f"{file} is not a result of `looptim evaluate`; repair or remove it")
            loops = re.search(r"\.loops(\d+)", file.stem)
            found.append((int(loops[1]) if loops else None, record))
        return found

    def read(self, name: str | None = None) -> Run:
        """Everything the run recorded, under the given name or the folder's."""
        if not self.path.is_dir():
            raise ValueError(f"there is no run directory {str(self.path)!r}; give one that `looptim train` wrote")
        self.check_links()
        there = [file for file in (self.config_file, self.environment_file) if file.is_file()]
        files = {file.name: file.read_text("utf-8", "replace") for file in there}
        if not self.metrics.path.is_file() and self.config_file not in there:
            raise ValueError(f"{self.path} is not a run, it has no metrics.jsonl; give one that `looptim train` wrote")
        lines = self.metrics.read()
        if not lines:
            raise ValueError(f"{self.path} has no metrics yet; wait for the run's first logged step")
        try:
            config = flat(tomllib.loads(files.get(self.config_file.name, "")))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ValueError(f"{self.config_file} is not valid TOML: {error}; repair it") from None
        # A model that was allowed to see the future must not pass for a language model in any table or figure.
        mark = " (noncausal)" if config.get("loop.noncausal") else ""
        return Run((name or self.path.resolve().name) + mark, lines, config, files, self.samples.read())


def difference(old: Config, new: Config) -> list[str]:
    """The differences between two configs, as `key: old -> new`; sharding is left out, since it changes no result."""
    before, after = (flat(config.model_dump(exclude={"parallel"})) for config in (old, new))
    keys = sorted(before.keys() | after.keys())
    return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in keys if before.get(k) != after.get(k)]


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> flat({"model": {"width": 64, "loop": {}}})
    {'model.width': 64}
    """
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


RECORD = "checkpoint.json"
"""The record of a checkpoint, written last; a folder without it is not a checkpoint."""


def step_of(checkpoint: Path) -> int:
    """The number of updates done when a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step_"))


class DamagedError(ValueError):
    """A checkpoint that cannot be read or has been altered."""

    def __init__(self, checkpoint: Path, reason: str):
        self.what = f"checkpoint {checkpoint} is damaged ({reason})"
        super().__init__(f"{self.what}; restore it from a copy, or delete it to start over")


def read_record(checkpoint: Path) -> dict[str, Any]:
    """The record of a checkpoint: step, config, versions, data."""
    try:
        record = json.loads((checkpoint / RECORD).read_text())
        if not isinstance(record, dict) or not record.keys() >= {"step", "data"}:
            raise ValueError("it has no step or no data")
        if record["step"] != step_of(checkpoint):
            raise ValueError(f"it was written after step {record['step']}")
    except ValueError as error:
        raise DamagedError(checkpoint, f"{RECORD}: {error}") from None
    return record


def _check_metrics(record: Any) -> dict[str, Any]:
    """Check a record of a run's metrics: an object with the numbers `step` and `tokens`.

    Every other value is a number or null, a list of those, or a mapping of names to such lists.
    """
    if not isinstance(record, dict):
        raise ValueError("metrics must be an object")
    if not isinstance(record.get("step"), int) or not isinstance(record.get("tokens"), int | float):
        raise ValueError("a line needs the numbers 'step' and 'tokens'")
    for key, value in record.items():
        lists = list(value.values()) if isinstance(value, dict) else [value if isinstance(value, list) else [value]]
        if not all(isinstance(values, list) and all(map(_is_number, values)) for values in lists):
            raise ValueError(f"{key!r} must be a number, a list of numbers, or a mapping of names to lists of numbers")
    return record


def _check_sample(record: Any) -> dict[str, Any]:
    """Check a sample: a prompt, and how the model continued it at a step."""
    numbers = isinstance(record, dict) and isinstance(record.get("step"), int) and _is_number(record.get("tokens"))
    if not numbers or not all(isinstance(record.get(key), str) for key in ("prompt", "text")):
        raise ValueError("a sample needs the numbers 'step' and 'tokens' and the texts 'prompt' and 'text'")
    return record


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _is_result(record: Mapping[str, Any]) -> bool:
    """Whether tables can be made from what claims to be the result of an evaluation."""
    try:
        settings, model = record["settings"], record["settings"]["model"]
        kinds = {
            str: [record["task"], *record["notes"], model["weights"], model["preset"]],
            int | float: [*record["results"].values(), *record["samples"].values()],
            int | None: [settings["limit"], model["loops"]],
            dict: [model["options"]],
        }
        fits = all(isinstance(each, kind) for kind, values in kinds.items() for each in values)
        return fits and min(model["parameters"], model["flops_per_token"]) > 0
    except (AttributeError, KeyError, TypeError):
        return False


@final
class Evaluation:
    """The files of an evaluated task, in the `eval` folder of a run or elsewhere."""

    def __init__(self, folder: Path, task: str, *, limit: int | None = None, loops: int | str | None = None):
        # A partial evaluation, or one at another depth (loops or an exit), does not replace the result.
        at = "" if loops is None else ".loops" + re.sub(r"[^\w.]+", "_", str(loops))
        part = "" if limit is None else f".limit{limit}"
        name = f"{task}{at}{part}"
        self.folder = folder
        self.result = folder / f"{name}.json"
        self.samples = folder / "samples" / f"{name}.json"
        """The model's answers, problem by problem."""
        self.answers = folder / ".partial" / f"{name}.jsonl"
        """The answers so far, while the task is running."""

    def read(self) -> dict[str, Any] | None:
        """The result; None if there is none that can be read."""
        return _read_object(self.result)

    def write(self, file: Path, value: Any) -> None:
        """Write the result or the samples as JSON."""
        with self.writing():
            write_whole(file, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")

    def writing(self) -> AbstractContextManager[None]:
        """Turn a refusal of the disk into one sentence."""
        return os_errors_as(f"cannot write results to {self.folder}", "free some space there, or choose another --out")


def _read_object(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def bits_per_byte(data: Mapping[str, Any]) -> float | None:
    """The factor from nats per token to bits per byte, from the tokens and bytes of the whole held-out text."""
    return data["valid_tokens"] / (data["valid_bytes"] * math.log(2)) if data.get("valid_bytes") else None


@final
@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a run directory: its metrics merged by step, and its config."""

    name: str
    lines: list[dict[str, Any]]
    config: dict[str, Any]
    """The config by keys such as `model.width`."""
    files: dict[str, str]
    """The text of config.toml and env.json."""
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The texts the run wrote at its validations."""

    @property
    def environment(self) -> dict[str, Any]:
        """What else the result may depend on, besides the config."""
        return json.loads(self.files["env.json"])

    @property
    def bits_per_byte(self) -> float | None:
        """The factor from nats per token to bits per byte, if the run records the length of its held-out text."""
        try:
            return bits_per_byte(self.environment["data"])
        except (ValueError, LookupError, TypeError, ArithmeticError):
            return None

    @property
    def preset(self) -> str:
        """The name of the transition, or of the run if the config does not tell."""
        return self.config.get("loop.preset") or self.config.get("model.loop.preset") or self.name

    @property
    def loops(self) -> list[int]:
        """How often each looped segment runs, as far as the config tells."""
        return [int(times) for times in re.findall(r"x(\d+)", str(self.config.get("model.layout", "")))]

    def column(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and the numbers under `key`, from the records that have one; null is NaN."""
        lines = [line for line in self.lines if key in line and _is_number(line[key])]
        return np.array([line["tokens"] for line in lines], float), np.array([line[key] for line in lines], float)

    def columns(self, key: str, name: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and the lists under `key`, or under `name` in a mapping, as (records, entries), padded with NaN."""
        pairs = []
        for line in self.lines:
            values = line.get(key)
            values = values.get(name) if isinstance(values, dict) else values
            if values and isinstance(values, list):
                pairs.append((line["tokens"], values))
        table = np.full((len(pairs), max((len(values) for _, values in pairs), default=0)), math.nan)
        for row, (_, values) in zip(table, pairs, strict=True):
            row[: len(values)] = np.array(values, float)
        return np.array([tokens for tokens, _ in pairs], float), table
