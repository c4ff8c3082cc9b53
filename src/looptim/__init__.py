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
    from .loop import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Names are looked up on first use, so that `looptim --help` does not import torch.
    loop = importlib.import_module(".loop", __name__)
    if name in loop.__all__:
        return getattr(loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *importlib.import_module(".loop", __name__).__all__])
