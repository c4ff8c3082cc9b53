"""The model and tokenizer of a run or of an exported folder, and a model as transformers sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .base.files import check_files
from .config import ModelConfig
from .data import Tokenizer
from .model import LoopedLM
from .rundir import RunDir
from .training import checkpoint
from .training.distributed import World
from .training.gate import code_change, recorded_code

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

    from .hf import LoopedForCausalLM


def load(path: str | Path) -> tuple[LoopedLM, Tokenizer]:
    """The model, in eval mode, and the tokenizer, from a run's last checkpoint or a folder that `export` wrote."""
    path, run = Path(path), RunDir(path)
    check_files([path, *path.glob("*"), *path.glob("checkpoints/*")])
    if run.latest() is not None:
        return _checked(path, *_load_run(run))
    if (path / "config.json").is_file():
        return _checked(path, *_load_export(path))
    if run.config_file.is_file():
        raise ValueError(f"{path} has no complete checkpoint yet; train it further, or give another run")
    raise ValueError(f"{path} is neither a run nor an exported model; give a folder with config.toml or config.json")


def _load_run(run: RunDir) -> tuple[LoopedLM, Tokenizer]:
    config = run.config()
    if config.pretrained.folder is not None:
        raise ValueError(
            f"{run.path} has trained a decoder of transformers; `looptim export` it, and give the folder to "
            "transformers, or to the verbs of looptim"
        )
    model = LoopedLM(config.model, seed=config.train.seed)
    _report_change(config.model, recorded_code(run), run.path)
    checkpoint.load_latest(run, model, None, World(0, 1, torch.device("cpu")))
    return model.eval(), Tokenizer.load(run.tokenizer)


def _report_change(config: ModelConfig, record: Mapping[str, Any], path: Path) -> None:
    change = code_change(config, record, path)
    if change is not None:
        print(change, file=sys.stderr)


def _checked(path: Path, model: LoopedLM, tokenizer: Tokenizer) -> tuple[LoopedLM, Tokenizer]:
    """Return the two if the tokenizer can be the one that the model was trained with."""
    if tokenizer.lacked_end:
        raise ValueError(f"the tokenizer of {path} has no token that ends a document, as the model expects")
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {path} has {tokenizer.vocab_size} tokens, but the model {model.config.vocab_size}; "
            "give it the one it was trained with"
        )
    return model, tokenizer


def _load_export(folder: Path) -> tuple[LoopedLM, Tokenizer]:
    if (folder / "adapter_config.json").exists():
        # Transformers would load the base model that the adapter names, wherever that is.
        raise ValueError(f"{folder} has an adapter beside its model; merge it, or remove adapter_config.json")
    hf = _hf()
    config = hf.LoopedConfig.from_file(folder / "config.json")
    try:
        with no_progress_bar():
            wrapped = hf.LoopedForCausalLM.from_pretrained(
                folder, config=config, use_safetensors=True, local_files_only=True
            )
    except ValueError:
        raise
    except Exception as error:
        # transformers and safetensors raise all kinds of errors for damaged files.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the model in {folder} cannot be read ({reason}); export it again") from error
    model = wrapped.looped.eval()
    _report_change(model.config, {"code": config.code} if hasattr(config, "code") else {}, folder)
    if wrapped.config.loops is not None:
        model.config = model.config.with_loops(wrapped.config.loops)
    return model, Tokenizer.load(folder)


def open_model(path: str | Path) -> tuple[LoopedLM | PreTrainedModel, Tokenizer]:
    """What `load` opens, or in eval mode the decoder that `looptim loop` wrote to a folder, or that a run exported."""
    folder, run = Path(path), RunDir(path)
    trained = run.config_file.is_file() and run.config().pretrained.folder is not None
    if trained and (run.model / "config.json").is_file():
        folder = run.model
    elif "base_model_type" not in _config_of(folder):
        return load(path)
    return _hf().open_folder(folder), Tokenizer.load(folder)


def _config_of(folder: Path) -> Mapping[str, Any]:
    """What a folder's config.json says; nothing where there is none, or one that is none."""
    try:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def wrap(model: LoopedLM, *, loops: int | None = None) -> LoopedForCausalLM:
    """The model as transformers sees it, sharing its weights; `loops` may set another number of loops."""
    return _hf().LoopedForCausalLM.from_looped(model, loops=loops)


def _hf():
    try:
        from . import hf
    except ImportError as error:
        raise ValueError(f"this needs transformers ({error}); pip install 'looptim[hf]'") from None
    return hf


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar, which would run into streamed or printed text."""
    _hf()
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
