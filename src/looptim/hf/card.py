"""The model card of an exported folder."""

from __future__ import annotations

from typing import cast

from ..config import Config
from ..loop import Loop, describe
from ..model import LoopedLM
from ..rundir import RunDir
from ..training.gate import recorded_code

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [looptim, looped-transformer]
---

# {name}

A looped language model, `{layout}` ({depth} unrolled layers, {parameters:,} parameters), trained with looptim.

## The transition

```
{transition}
```

## Data

Source `{source}`, tokenizer `{tokenizer}` with {vocabulary:,} tokens, sequences of {seq_len:,} tokens.

## Metrics

{metrics}

## How to load

looptim has to be installed, with its extra `hf`; nothing in this folder is executed.{needs}

```python
import looptim.hf
{own}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

`vllm serve FOLDER` works too{where}. Sequences have at most {max_length:,} tokens.
"""


OWN = """
Its transition is code of its author's, `{preset}`, which is not in this folder: looptim must have it first."""
WHERE = """ where an installed package has the transition among its entry points (`looptim.presets`): the processes
of vLLM import nothing else"""


def write_card(run: RunDir, config: Config, model: LoopedLM) -> str:
    """What the model is, what it was trained on, what it reached, and how to load it."""
    loops = cast("list[Loop]", list(model.loops))
    last = run.metrics.last("valid_loss")
    preset = config.model.loop.preset
    own = recorded_code(run).get("code") is not None
    metrics = "No validation was logged."
    if last:
        metrics = f"Validation loss {last['valid_loss']:.4f} nats per token after {last['tokens']:,} tokens."
    return CARD.format(
        name=run.path.resolve().name,
        layout=model.config.layout,
        depth=sum(segment.blocks * (segment.loops or 1) for segment in model.config.segments),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        transition=str(describe(loops[0])) if loops else "none: every layer runs once",
        source=config.data.source,
        tokenizer=config.data.tokenizer,
        vocabulary=model.config.vocab_size,
        seq_len=config.train.seq_len,
        metrics=metrics,
        max_length=model.config.max_length,
        needs=OWN.format(preset=preset) if own else "",
        own=f"looptim.import_code({_place(preset)})  # which has its transition\n" if own else "",
        where=WHERE if own else "",
    )


def _place(preset: str) -> str:
    """The file or module of a preset, as Python code; a plain name does not tell where it was registered."""
    place, _, _ = preset.rpartition(":")
    return repr(place) if place else "FILE_OR_MODULE"
