"""From a run to a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

from ..base.files import whole_folder, write_whole
from ..data import task_options
from ..loading import load, no_progress_bar, wrap
from ..rundir import RunDir
from ..training.gate import recorded_code
from .card import write_card


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
    model, tokenizer = load(run)
    wrapped = wrap(model)
    data = folder.config().data
    if data.source.startswith("synthetic:"):
        # The task is exported too, so that the model can be evaluated on what it was trained on.
        wrapped.config.task_specific_params = task_options(data)
    code = recorded_code(folder).get("code")
    if code is not None:
        # The export does not contain a transition of the user's own, which is known only by its source.
        wrapped.config.code = code
    wrapped.generation_config.eos_token_id = tokenizer.eos
    try:
        # The earlier export stays until this one is complete, since a folder without weights would look like an export.
        with whole_folder(out, replace=True) as aside, no_progress_bar():
            wrapped.save_pretrained(aside)
            tokenizer.save(aside, max_length=model.config.max_length)
            write_whole(aside / "README.md", write_card(folder, folder.config(), model))
    except Exception as error:
        # A full disk is an OSError here and an error of safetensors elsewhere.
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
