"""Looped models in vLLM, through its Transformers backend: what the entry point `vllm.general_plugins` calls."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"
"""Runs a model of transformers with vLLM's attention and linear layers. Its form for experts would exchange ours."""


def register() -> None:
    """Tell vLLM, in each of its processes, which classes our folders name and that the Auto classes know them.

    After that `vllm serve DIR` works on an exported folder, without `trust_remote_code`.
    """
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]

    # Importing it registers the Auto classes.
    from . import LoopedForCausalLM

    foreign = {f"Looped{name}" for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str)}
    for architecture in {LoopedForCausalLM.__name__, *foreign}:
        ModelRegistry.register_model(architecture, BACKEND)
