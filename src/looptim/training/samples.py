"""Text that a run writes at its validations: the report shows how `train.sample` is continued over time."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from .step import TrainingState

LENGTH = 64
"""The largest number of tokens in a continuation."""
TEMPERATURE = 0.8


def check_prompt(run: TrainingState) -> None:
    """Check that the model is long enough for the prompt and some continuation."""
    length, most = len(_prompt(run)), run.config.model.max_length
    if run.config.train.sample is not None and length >= most:
        raise ValueError(f"train.sample has {length} tokens, but model.max_length is {most}; give a shorter text")


def _prompt(run: TrainingState) -> list[int]:
    return run.data.tokenizer.encode(run.config.train.sample or "") or [run.data.tokenizer.eos]


@torch.no_grad()
def write(run: TrainingState) -> str:
    """How the model continues `train.sample`, drawn from the run's seed alone.

    Every process takes part, since each may hold a piece of the model. There is no cache: all forward passes have the
    same length, which needs no recompilation, and a causal model does not see what comes later.
    """
    tokenizer, model = run.data.tokenizer, run.model
    ids = _prompt(run)
    end = min(len(ids) + LENGTH, run.config.model.max_length)
    tokens = torch.full((1, end), tokenizer.eos, device=run.world.device)
    tokens[0, : len(ids)] = torch.tensor(ids, device=run.world.device)
    generator = torch.Generator().manual_seed(run.config.train.seed)
    model.eval()
    for place in range(len(ids), end):
        bf16 = run.config.train.dtype == "bf16"
        with torch.autocast(run.world.device.type, torch.bfloat16) if bf16 else nullcontext():
            logits = model(tokens)[0, place - 1].float().cpu()
        tokens[0, place] = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator).item()
    model.train()
    written = tokens[0].tolist()
    # What follows the end of a document belongs to another one.
    after = written[len(ids) :]
    after = after[: after.index(tokenizer.eos)] if tokenizer.eos in after else after
    return tokenizer.decode(ids + after)[len(tokenizer.decode(ids)) :]
