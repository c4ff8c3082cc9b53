"""From a run to a folder that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..base.files import whole_folder, write_whole
from ..config import Config
from ..data import Tokenizer, task_options
from ..loading import load, no_progress_bar, wrap
from ..rundir import RunDir
from ..training.gate import recorded_code
from .card import write_card
from .trainee import load_trained


def export(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the model of a run's last checkpoint, with its config and tokenizer, to `out`; RUN/model by default."""
    folder = RunDir(run)
    folder.check_links()
    out = folder.model if out is None else Path(out)
    if out.resolve() == Path.cwd():
        raise ValueError(f"{out} is the current folder, which an export would replace; give one inside it")
    if out.exists() and not _is_export(out):
        raise ValueError(f"{out} exists and is not an exported model; give a new folder")
    if folder.latest() is None:
        raise ValueError(f"{run} has no complete checkpoint; give the folder of a run that has reached one")
    config = folder.config()
    if config.pretrained.folder is not None:
        return _export_decoder(folder, config, out)
    model, tokenizer = load(run)
    wrapped = wrap(model)
    data = config.data
    if data.source.startswith("synthetic:"):
        # The task is exported too, so that the model can be evaluated on what it was trained on.
        wrapped.config.task_specific_params = task_options(data)
    code = recorded_code(folder).get("code")
    if code is not None:
        # The export does not contain a transition of the user's own, which is known only by its source.
        wrapped.config.code = code
    for settings in (wrapped.config, wrapped.generation_config):
        settings.bos_token_id, settings.eos_token_id = tokenizer.bos, tokenizer.eos
        # Nothing but the attention mask tells padding from the end of a document.
        settings.pad_token_id = tokenizer.eos
    with _writing(out) as aside:
        wrapped.save_pretrained(aside)
        tokenizer.save(aside, max_length=model.config.max_length)
        write_whole(aside / "README.md", write_card(folder, config, model))
    return out


def _export_decoder(folder: RunDir, config: Config, out: Path) -> Path:
    """The decoder that a run has trained, its adapters merged, with the tokenizer of its base."""
    model: Any = load_trained(folder, config)
    tokenizer = AutoTokenizer.from_pretrained(config.pretrained.folder, local_files_only=True)
    # The template of the conversations it was trained on may be another.
    tokenizer.chat_template = Tokenizer.load(folder.tokenizer).chat_template
    tokenizer.model_max_length = min(tokenizer.model_max_length, config.model.max_length)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    with _writing(out) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        write_whole(aside / "README.md", write_card(folder, config, model))
    return out


@contextmanager
def _writing(out: Path) -> Iterator[Path]:
    """A folder that becomes `out`; an earlier export stays until this one is complete."""
    try:
        with whole_folder(out, replace=True) as aside, no_progress_bar():
            yield aside
    except Exception as error:
        # A full disk is an OSError here and an error of safetensors elsewhere.
        raise ValueError(f"could not export to {out}: {str(error).splitlines()[0]}") from error


def _is_export(folder: Path) -> bool:
    """Whether a folder is an earlier export, which may be replaced, or empty."""
    if not folder.is_dir():
        return False
    try:
        known = json.loads((folder / "config.json").read_text())
        return known.get("model_type") == "looptim" or "base_model_type" in known
    except (OSError, ValueError, AttributeError):
        return not any(folder.iterdir())
