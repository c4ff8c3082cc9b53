"""From a run to a folder that transformers loads, and from either back to a model and its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from . import checkpoint
from .data import Tokenizer
from .model import LoopedLM
from .recipe import load_config
from .train import load

if TYPE_CHECKING:
    from .hf import LoopedForCausalLM


def export(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the model of a run's last checkpoint, with its config and tokenizer, to `out`; RUN/model by default."""
    out = Path(run) / "model" if out is None else Path(out)
    if out.resolve() == Path.cwd():
        raise ValueError(f"{out} is the current folder, which an export would replace; give one inside it")
    if out.exists() and not _is_export(out):
        raise ValueError(f"{out} exists and is no exported model; give a folder that is not there yet")
    model, tokenizer = load(run)
    wrapped = wrap(model)
    data = load_config(Path(run) / "config.toml").data
    if data.source.startswith("synthetic:"):
        # So that the export can be asked the task the run was trained on.
        wrapped.config.task_specific_params = {data.source.removeprefix("synthetic:"): data.options}
    wrapped.generation_config.eos_token_id = tokenizer.eos
    # Aside first: a folder without its weights would look like an export, and the one before stays until this is whole.
    aside, before = (out.with_name(f".{out.name}.{state}") for state in ("partial", "before"))
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with _no_progress_bar():
            wrapped.save_pretrained(aside)
        tokenizer.save(aside)
        shutil.rmtree(before, ignore_errors=True)
        if out.exists():
            out.rename(before)
        aside.rename(out)
        shutil.rmtree(before, ignore_errors=True)
    except Exception as error:
        # Whatever safetensors raises for a full disk, too.
        shutil.rmtree(aside, ignore_errors=True)
        raise ValueError(f"could not export to {out}: {str(error).splitlines()[0]}") from error
    return out


def _is_export(folder: Path) -> bool:
    """Whether a folder is an earlier export, which may be replaced, or empty."""
    if not folder.is_dir():
        return False
    try:
        return json.loads((folder / "config.json").read_text()).get("model_type") == "looptim"
    except (OSError, ValueError, AttributeError):
        return not any(folder.iterdir())


def open_model(path: str | Path) -> tuple[LoopedLM, Tokenizer]:
    """The model and tokenizer of a run, or of a folder that `export` wrote."""
    path = Path(path)
    if checkpoint.latest(path) is not None:
        return load(path)
    if (path / "config.json").is_file():
        with _no_progress_bar():
            wrapped = _hf().LoopedForCausalLM.from_pretrained(path)
        model = wrapped.looped.eval()
        if wrapped.config.loops is not None:
            model.config = model.config.with_loops(wrapped.config.loops)
        return model, Tokenizer.load(path)
    if (path / "config.toml").is_file():
        raise ValueError(f"{path} has no complete checkpoint yet; train it further, or give another run")
    raise ValueError(f"{path} is neither a run nor an exported model; give a folder with config.toml or config.json")


def wrap(model: LoopedLM, *, loops: int | None = None) -> LoopedForCausalLM:
    """The model under transformers, sharing its weights; `loops` where its transition allows another number."""
    return _hf().LoopedForCausalLM.from_looped(model, loops=loops)


def _hf():
    try:
        from . import hf
    except ImportError as error:
        raise ValueError(f"this needs transformers ({error}); pip install 'looptim[hf]'") from None
    return hf


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A bar for a few tensors would run into the text that is streamed, or printed."""
    _hf()
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
