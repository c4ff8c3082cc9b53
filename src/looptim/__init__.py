"""looptim: loop transitions for looped transformers, written as optimizer steps.

>>> import torch
>>> import looptim as lo
>>> loop = lo.build("operloop", width=64, steps=3)
>>> loop(torch.randn(2, 10, 64), torch.nn.Linear(64, 64)).shape
torch.Size([2, 10, 64])
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bench import bench  # noqa: F401
    from .config import Config, ModelConfig  # noqa: F401
    from .count import count  # noqa: F401
    from .evaluate import evaluate  # noqa: F401
    from .export import export  # noqa: F401
    from .generate import generate  # noqa: F401
    from .loop import *  # noqa: F403
    from .model import LoopedLM  # noqa: F401
    from .recipe import load_config  # noqa: F401
    from .report import report  # noqa: F401
    from .study import study  # noqa: F401
    from .train import load, train  # noqa: F401

__version__ = "0.1.0"

_HOMES = {
    "Config": "config",
    "ModelConfig": "config",
    "load_config": "recipe",
    "LoopedLM": "model",
    "bench": "bench",
    "count": "count",
    "evaluate": "evaluate",
    "export": "export",
    "generate": "generate",
    "load": "train",
    "report": "report",
    "study": "study",
    "train": "train",
}
"""The modules of the names that are not the framework's."""


def __getattr__(name: str) -> Any:
    # Names are looked up on first use, so that `looptim --help` does not import torch.
    if name.startswith("__"):
        raise AttributeError(name)
    home = importlib.import_module(f".{_HOMES.get(name, 'loop')}", __name__)
    if name in _HOMES or name in home.__all__:
        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES, *importlib.import_module(".loop", __name__).__all__])


class _Package(ModuleType):
    """Importing the submodule `looptim.count` must not put it where the function `looptim.count` is promised."""

    def __setattr__(self, name: str, value: Any) -> None:
        verb = isinstance(value, ModuleType) and name in _HOMES
        super().__setattr__(name, getattr(value, name) if verb else value)


sys.modules[__name__].__class__ = _Package
