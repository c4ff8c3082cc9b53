"""Optional places to send metrics to: trackio, wandb and tensorboard behind one small protocol.

`metrics.jsonl` is the record of a run; a sink is a copy for people who like a dashboard. All of them work offline.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, final

from ..base.choices import nearest
from ..base.files import write_whole
from ..rundir import RunDir

PROJECT = "looptim"
"""The project under which trackio and wandb list the runs."""


class Sink(Protocol):
    """Where the numbers of a step go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of one step."""
        ...

    def close(self) -> None:
        """Send what is still buffered; a second call does nothing."""
        ...


def open_sinks(names: Sequence[str], run: RunDir, *, config: Mapping[str, Any]) -> list[Sink]:
    """The sinks called `names` for a run; a resumed run continues its existing dashboards.

    >>> open_sinks([], RunDir("runs/nano"), config={})
    []
    """
    if isinstance(names, str):
        raise ValueError(f"sinks must be a list of names, got the string {names!r}; write [{names!r}]")
    modules = check_sinks(names)
    sinks: list[Sink] = []
    try:
        for name, module in modules.items():
            sinks.append(SINKS[name](module, run, dict(config)))
    except BaseException:
        for sink in sinks:
            sink.close()
        raise
    return sinks


def check_sinks(names: Sequence[str]) -> dict[str, Any]:
    """Import the sinks' packages, or raise a ValueError before anything is created or computed."""
    return {name: _import(name) for name in names}


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record under flat names, as dashboards want them, without `step` and anything that is no number.

    >>> scalars({"step": 7, "loss": 2.5, "step_size": [0.9, 0.8], "moe_load": {"blocks.1": [1.5]}})
    {'loss': 2.5, 'step_size/0': 0.9, 'step_size/1': 0.8, 'moe_load/blocks.1/0': 1.5}
    """
    return {name: value for name, value in _leaves("", record) if name != "step"}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{name}/{key}" if name else str(key), item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


@final
class Trackio:
    """A run of trackio, in its local database unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say otherwise."""

    def __init__(self, module: Any, run: RunDir, config: dict[str, Any]):
        self._module = module
        name = f"{run.path.resolve().name}-{_tracking_id(run)}"
        # trackio prints to stdout, which is reserved for the command's own answer.
        with contextlib.redirect_stdout(sys.stderr):
            self._run: Any = module.init(
                project=PROJECT, name=name, config=config, resume="allow", auto_log_cpu=False, auto_log_gpu=False
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run = None
            with contextlib.redirect_stdout(sys.stderr):
                self._module.finish()


@final
class Wandb:
    """A run of wandb, kept in the run's folder for `wandb sync` unless WANDB_MODE=online."""

    def __init__(self, module: Any, run: RunDir, config: dict[str, Any]):
        self._run: Any = module.init(
            project=PROJECT,
            name=run.path.resolve().name,
            id=_tracking_id(run),
            resume="allow",
            dir=str(run.path),
            config=config,
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


@final
class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, module: Any, run: RunDir, config: dict[str, Any]):
        self._writer: Any = module.SummaryWriter(log_dir=str(run.tensorboard))
        # tensorboard's Markdown renders text that is indented by four spaces as code.
        self._writer.add_text("config", "\n".join(f"    {name} = {value!r}" for name, value in config.items()))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


SINKS: dict[str, Callable[[Any, RunDir, dict[str, Any]], Sink]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
}
"""Sinks by name, which is also the name of the package on PyPI."""

_MODULES = {"tensorboard": "torch.utils.tensorboard"}


def _import(name: str) -> Any:
    if name not in SINKS:
        raise ValueError(f"unknown sink {name!r}{nearest(name, SINKS)} known: {', '.join(SINKS)}")
    try:
        return importlib.import_module(_MODULES.get(name, name))
    except ImportError as error:
        raise ValueError(f"sink {name!r} cannot be imported ({error}); run `pip install {name}`") from None


def _tracking_id(run: RunDir) -> str:
    """A name that moves and dies with the folder, so two runs called `nano` differ and a resumed run keeps its name."""
    path = run.tracking_file
    if path.is_file() and (known := path.read_text().strip()):
        return known
    fresh = uuid.uuid4().hex[:8]
    write_whole(path, fresh + "\n")
    return fresh
