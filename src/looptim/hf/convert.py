"""Whether weights in files fit a model, known before anything is allocated."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from transformers.modeling_utils import PreTrainedModel


def check_fit(model: PreTrainedModel, files: list[str]) -> None:
    """A ValueError unless the files have exactly the tensors of the model, in name and shape."""
    if not files or not all(file.endswith(".safetensors") for file in files):
        return
    there: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            there |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
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
