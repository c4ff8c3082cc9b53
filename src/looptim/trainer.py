"""Training what a recipe describes: a model of ours, or a decoder of transformers."""

from __future__ import annotations

from pathlib import Path

from .config import Config
from .training.maker import OURS
from .training.train import train as train_with


def train(config: Config, out: str | Path, *, resume: bool = False, force: bool = False, progress: bool = True) -> Path:
    """Train the model of a recipe into the run directory `out`, which is returned.

    `resume` continues from the last complete checkpoint, or begins if there is none; a changed config is refused with
    the difference shown unless `force`. Ctrl-C leaves a checkpoint behind.
    """
    maker = OURS
    if config.pretrained.folder is not None:
        try:
            from .hf import maker as decoders
        except ImportError as error:
            raise ValueError(f"pretrained.folder needs transformers ({error}); pip install 'looptim[hf]'") from None
        maker, config = decoders.DECODER, decoders.complete(config)
    return train_with(config, out, maker=maker, resume=resume, force=force, progress=progress)
