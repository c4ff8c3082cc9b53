"""Names of weights in files: older names, and the check that they fit a model."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from safetensors import safe_open
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import PreTrainedModel

OLD_NAMES = {"looped.head.": "lm_head.", "looped.embedding.": "model.embed_tokens.", "looped.": "model."}
"""Old and new prefixes; exports once had a child `looped` that held the whole model."""


def renamings() -> list[WeightRenaming]:
    """`OLD_NAMES` for transformers' loading, created anew each time because the objects remember what they renamed."""
    return [WeightRenaming("^" + old.replace(".", r"\."), new) for old, new in OLD_NAMES.items()]


def check_fit(model: PreTrainedModel, files: list[str]) -> None:
    """Raise a ValueError unless the files have exactly the tensors of the model; a body has no head."""
    if not files or not all(file.endswith(".safetensors") for file in files):
        return
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    there: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                there[_name_in_model(name, here)] = tuple(tensors.get_slice(name).get_shape())
    if model.base_model is model:
        there.pop("lm_head.weight", None)
    faults = {
        "missing": sorted(here.keys() - there.keys() - model.all_tied_weights_keys.keys()),
        "unknown": sorted(there.keys() - here.keys()),
        "of another shape": sorted(name for name in here.keys() & there.keys() if here[name] != there[name]),
    }
    listed = [f"{len(names)} {what} (such as {names[0]})" for what, names in faults.items() if names]
    if listed:
        raise ValueError(
            f"the weights in {Path(files[0]).parent} do not fit the config: {', '.join(listed)}; "
            "load them with the config they were saved with"
        )


def _name_in_model(name: str, known: Container[str]) -> str:
    """The name that a weight from a file has in a model, which may be the body or include a head."""
    for old, new in OLD_NAMES.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return next((each for each in (name, name.removeprefix("model."), f"model.{name}") if each in known), name)
