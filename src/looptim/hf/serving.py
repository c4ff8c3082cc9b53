"""Looped models for users: in vLLM, behind an OpenAI-compatible server, and in a terminal."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, TextStreamer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..rundir import RunDir
from .decoder import causal_class
from .model import LoopedForCausalLM
from .opening import open_config, open_folder

BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"
"""Runs a transformers model with vLLM's attention and linear layers. Its class for experts would replace ours."""


def register() -> None:
    """Tell each process of vLLM which classes our folders name, and register them with the Auto classes.

    The entry point `vllm.general_plugins` calls it. After that `vllm serve DIR` works on an exported folder, without
    `trust_remote_code`.
    """
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]

    foreign = {f"Looped{name}" for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str)}
    for architecture in {LoopedForCausalLM.__name__, *foreign}:
        ModelRegistry.register_model(architecture, BACKEND)


def serve(run: str | Path, *, host: str = "localhost", port: int = 8000) -> None:
    """Answer requests in the words of OpenAI, such as POST /v1/completions, until it is stopped: `transformers serve`.

    That looks a class up in transformers itself, where ours is put for as long as this process lives.
    """
    folder = model_folder(run)
    for package in ("fastapi", "uvicorn", "openai"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"serving needs {package}; pip install 'transformers[serving]'")
    from transformers.cli.serve import Serve

    kind = causal_class(open_config(folder))
    setattr(transformers, kind.__name__, kind)
    Serve(force_model=str(folder), host=host, port=port)


def chat(run: str | Path, said: Iterable[str], *, max_new_tokens: int = 256, temperature: float = 0.8) -> list[Any]:
    """A conversation: answers each line of `said`, printing as it goes; the messages of both sides.

    The tokenizer's chat template makes the prompt. Without one the model, which then has learned no conversation, goes
    on where the text ends.
    """
    folder = model_folder(run)
    model: Any = open_folder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    messages: list[dict[str, str]] = []
    for line in said:
        messages.append({"role": "user", "content": line})
        if tokenizer.chat_template:
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids = prompt["input_ids"]
        else:
            ids = tokenizer("".join(message["content"] for message in messages), return_tensors="pt").input_ids
        room = model.config.max_position_embeddings - ids.shape[1]
        if room < 1:
            raise ValueError(f"the conversation has {ids.shape[1]} tokens, more than the model takes; begin anew")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        out = model.generate(ids, streamer=streamer, max_new_tokens=min(max_new_tokens, room), **sampling)
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    return messages


def model_folder(run: str | Path) -> Path:
    """The folder with a model that transformers loads: the one given, or that of a run."""
    for folder in (Path(run), RunDir(run).model):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"{run} has no exported model; give a folder that `looptim export` or `looptim loop` wrote")
