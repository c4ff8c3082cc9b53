"""looptim: loop transitions for looped transformers, written as optimizer steps.

>>> import torch
>>> import looptim as lo
>>> loop = lo.build("operloop", width=64, steps=3)
>>> loop(torch.randn(2, 10, 64), torch.nn.Linear(64, 64)).shape
torch.Size([2, 10, 64])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config, ModelConfig  # noqa: F401
    from .evaluation.run import evaluate  # noqa: F401
    from .generation import generate  # noqa: F401
    from .hf.choose import choose_layers  # noqa: F401
    from .hf.export import export  # noqa: F401
    from .hf.loop_model import loop_model  # noqa: F401
    from .loading import load  # noqa: F401
    from .loop import *  # noqa: F403
    from .loop.table import zoo  # noqa: F401
    from .model.count import count  # noqa: F401
    from .model.lm import LoopedLM  # noqa: F401
    from .recipe import load_config  # noqa: F401
    from .reporting.look import look  # noqa: F401
    from .reporting.report import report  # noqa: F401
    from .reporting.tour import demo  # noqa: F401
    from .studies.run import study  # noqa: F401
    from .trainer import train  # noqa: F401
    from .training.bench import bench  # noqa: F401
    from .training.plan import plan  # noqa: F401

__version__ = "0.1.0"

_HOMES = {
    "Config": "config",
    "ModelConfig": "config",
    "load_config": "recipe",
    "LoopedLM": "model.lm",
    "bench": "training.bench",
    "count": "model.count",
    "demo": "reporting.tour",
    "evaluate": "evaluation.run",
    "export": "hf.export",
    "generate": "generation",
    "load": "loading",
    "look": "reporting.look",
    "loop_model": "hf.loop_model",
    "plan": "training.plan",
    "choose_layers": "hf.choose",
    "report": "reporting.report",
    "study": "studies.run",
    "train": "trainer",
    "zoo": "loop.table",
}
"""The module that defines each public name outside the framework. No verb shares its name with a module."""

_EXTRAS = {
    "choose_layers": "hf",
    "demo": "all",
    "evaluate": "eval",
    "export": "hf",
    "generate": "hf",
    "load": "lm",
    "look": "lm",
    "loop_model": "hf",
    "plan": "lm",
    "report": "plot",
    "study": "plot",
    "train": "lm",
}
"""Names that need more than the plain wheel, and the extra that installs what they need."""


def __getattr__(name: str) -> Any:
    # Names are looked up on first use, so that `looptim --help` does not import torch.
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        home = importlib.import_module(f".{_HOMES.get(name, 'loop')}", __name__)
    except ModuleNotFoundError as error:
        if name not in _EXTRAS or (error.name or "").startswith("looptim"):
            raise
        raise ValueError(f"{name} needs {error.name}; pip install 'looptim[{_EXTRAS[name]}]'") from None
    if name in _HOMES or name in home.__all__:
        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES, *importlib.import_module(".loop", __name__).__all__])
