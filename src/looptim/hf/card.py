"""The model card of an exported folder."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..config import Config, parse_layout
from ..loop import Loop, describe
from ..loop.registry import code_of
from ..rundir import RunDir
from ..training.gate import recorded_code

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [looptim, looped-transformer]
---

# {name}

A looped language model, `{layout}` ({depth} unrolled layers, {parameters:,} parameters), {made}.

## The transition

```
{transition}
```
{trained}
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

TRAINED = """
## Data

Source `{source}`, tokenizer `{tokenizer}` with {vocabulary:,} tokens, sequences of {seq_len:,} tokens.

## Metrics

{metrics}
"""

OWN = """
Its transition is code of its author's, `{preset}`, which is not in this folder: looptim must have it first."""
WHERE = """ where an installed package has the transition among its entry points (`looptim.presets`): the processes
of vLLM import nothing else"""


def write_card(run: RunDir, config: Config, model: nn.Module) -> str:
    """What the model of a run is, what it was trained on, what it reached, and how to load it."""
    last = run.metrics.last("valid_loss")
    metrics = "No validation was logged."
    if last:
        metrics = f"Validation loss {last['valid_loss']:.4f} nats per token after {last['tokens']:,} tokens."
    made, pretrained = "trained with looptim", config.pretrained
    if pretrained.folder is not None:
        what = {"transition": "its transition", "lora": "its transition and low-rank adapters", "all": "all weights"}
        made = f"a pretrained decoder of which looptim has trained {what[pretrained.weights]}"
    trained = TRAINED.format(
        source=config.data.source,
        tokenizer=config.data.tokenizer if pretrained.folder is None else "of the base",
        vocabulary=config.model.vocab_size,
        seq_len=config.train.seq_len,
        metrics=metrics,
    )
    values = {"name": run.path.resolve().name, "made": made, "trained": trained}
    own = recorded_code(run).get("code") is not None
    return _write(model, config.model.layout, config.model.loop.preset, config.model.max_length, own=own, **values)


def write_looped_card(model: Any) -> str:
    """What a decoder is that was looped and not trained."""
    made = f"made of a {type(model).__mro__[2].__name__} by `looptim loop`; nothing was trained"
    config = model.config
    values = {"name": f"A looped {config.base_model_type}", "made": made, "trained": ""}
    own = code_of(config.loop["preset"]) is not None
    return _write(model, config.layout, config.loop["preset"], config.max_position_embeddings, own=own, **values)


def _write(model: nn.Module, layout: str, preset: str, max_length: int, *, own: bool, **values: str) -> str:
    loops = [part for part in model.modules() if isinstance(part, Loop)]
    return CARD.format(
        layout=layout,
        depth=sum(segment.blocks * (segment.loops or 1) for segment in parse_layout(layout)),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        transition=str(describe(loops[0])) if loops else "none: every layer runs once",
        max_length=max_length,
        needs=OWN.format(preset=preset) if own else "",
        own=f"looptim.import_code({_place(preset)})  # which has its transition\n" if own else "",
        where=WHERE if own else "",
        **values,
    )


def _place(preset: str) -> str:
    """The file or module of a preset, as Python code; a plain name does not tell where it was registered."""
    place, _, _ = preset.rpartition(":")
    return repr(place) if place else "FILE_OR_MODULE"
