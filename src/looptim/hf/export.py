"""From a run to a folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ..loading import load, no_progress_bar, wrap
from ..recipe import load_config
from ..training import checkpoint


def export(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the model of a run's last checkpoint, with its config and tokenizer, to `out`; RUN/model by default."""
    out = Path(run) / "model" if out is None else Path(out)
    if out.resolve() == Path.cwd():
        raise ValueError(f"{out} is the current folder, which an export would replace; give one inside it")
    if out.exists() and not _is_export(out):
        raise ValueError(f"{out} exists and is no exported model; give a folder that is not there yet")
    if checkpoint.latest(Path(run)) is None:
        raise ValueError(f"{run} has no complete checkpoint; give the folder of a run that has reached one")
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
        with no_progress_bar():
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
