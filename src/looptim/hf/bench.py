"""The benchmarks of `looptim bench --suite`: ratios inside one run, against vanilla loops and peers of transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.choices import choose
from ..config import Config, ModelConfig
from ..loop import build
from ..model import Layout, LoopedLM
from ..model.alone import lay_together
from ..model.count import count
from ..recipe import load_config
from ..training.bench import bench, quartiles, rounds
from ..training.optim import MuonAdamW, parameter_groups
from ..training.peak import clock, gemm_peak
from ..training.record import Recorder
from . import peers
from .baseline import Measure
from .model import LoopedForCausalLM

VIEWS = {"view", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "t", "expand", "slice", "select", "split"}
VIEWS |= {"split_with_sizes", "unbind", "permute", "alias", "detach", "_reshape_alias", "as_strided", "promote_types"}
"""Operations that compute nothing."""


def suite(only: Iterable[str] = (), *, repeats: int = 9) -> list[Measure]:
    """What is watched, or of it these groups: each a ratio of two things that took turns, a share, or a count."""
    groups = [choose("group of the suite", name, SUITE) for name in dict.fromkeys(only)] or list(SUITE.values())
    return [measure for group in groups for measure in group(repeats)]


def transition(repeats: int) -> list[Measure]:
    """OperLoop over the vanilla loop: forward and backward, in a study's model and in a wider."""
    study = load_config("study")
    return [*_over_vanilla("study", study, repeats), *_over_vanilla("width 256, K = 4", None, repeats)]


def compiled(repeats: int) -> list[Measure]:
    """The same in a study's model, compiled."""
    study = load_config("study", set=["train.compile=true"])
    return _over_vanilla("study, compiled", study, repeats)


def _over_vanilla(name: str, config: Config | None, repeats: int) -> list[Measure]:
    _, operloop = bench("operloop", config, repeats=repeats)["rows"]
    low, high = operloop["time_quartiles"]
    shares = [operloop["flops"] / time for time in (high, operloop["time"], low)]
    return [
        Measure(f"operloop over vanilla, {name}", low, operloop["time"], high, "lower"),
        Measure(f"utilization of operloop over vanilla, {name}", *shares, "higher"),
    ]


def optimizer(repeats: int) -> list[Measure]:
    """The share of the GEMM peak in whole updates of `small`, Muon included."""
    config = load_config("small")
    model, optim = LoopedLM(config.model, seed=0), config.optim
    muon = MuonAdamW(parameter_groups(model, lr=optim.lr, weight_decay=optim.weight_decay, rates=optim.rates))
    tokens = torch.randint(config.model.vocab_size, (config.train.batch_size, config.train.seq_len))
    forward_backward = peers.training_call(model, tokens)

    def update() -> None:
        forward_backward()
        muon.step()

    flops = 3 * sum(count(config).flops.values()) * tokens.numel()
    times = [turn["update"] for turn in rounds({"update": update}, repeats, "cpu")]
    peak = gemm_peak(torch.device("cpu"), "fp32", clock("cpu"))
    return [
        Measure("utilization with the optimizer, small", *(flops / peak / t for t in quartiles(times)[::-1]), "higher")
    ]


def compiling(repeats: int) -> list[Measure]:
    """CPU seconds of the first forward and backward of a compiled `study`, with empty caches, once."""
    with TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        answer = subprocess.run(
            [sys.executable, "-c", COLD], env=environment, capture_output=True, text=True, check=True
        )
    seconds = float(answer.stdout)
    return [Measure("CPU seconds to compile study, cold", seconds, seconds, seconds, "lower")]


COLD = """
import os, torch
from looptim import LoopedLM, load_config
config = load_config("study")
model = LoopedLM(config.model, seed=0)
model.compile_blocks()
tokens = torch.zeros(config.train.batch_size, config.train.seq_len, dtype=torch.long)
before = sum(os.times()[:4])
model.loss(tokens, tokens).loss.backward()
print(sum(os.times()[:4]) - before)
"""


def saved_words(*, reversible: bool, width: int = 128, tokens: int = 2048) -> Measure:
    """What an OperLoop step keeps for the backward, in words of d per token: loops of 5 and of 3 steps, compared."""
    kept = []
    for steps in (3, 5):
        loop = build("operloop", width=width, steps=steps)
        if reversible:
            loop.reverse()
        with Recorder() as seen:
            h = loop(torch.randn(1, tokens, width, requires_grad=True), lambda o: 2 * o)
            assert isinstance(h, Tensor) and h.requires_grad
            kept.append(seen.live["activations"] / h.nbytes)
    words = (kept[1] - kept[0]) / 2
    name = f"d words per token kept by {'a reversible' if reversible else 'an'} operloop step"
    return Measure(name, words, words, words, "lower")


def kept_memory(blocks: int, loops: int, tokens: int = 256) -> Measure:
    """What a forward of `study` leaves for the backward, reversible OperLoop over vanilla, both recomputing blocks."""
    kept = {}
    for preset in ("vanilla", "operloop"):
        study = load_config("study").model
        config = study.model_copy(
            update={"layout": f"1-{blocks}x{loops}-1", "loop": study.loop.model_copy(update={"preset": preset})}
        )
        model = LoopedLM(config, seed=0)
        model.checkpointing = True
        if preset == "operloop":
            model.reverse_loops()
        batch = torch.randint(config.vocab_size, (1, tokens))
        with Recorder() as seen:
            seen.hold("parameters", model.parameters())
            output = model.loss(batch, batch)
            kept[preset] = seen.live["activations"]
            # What a backward needs is alive as long as the loss is.
            del output
    ratio = kept["operloop"] / kept["vanilla"]
    return Measure(f"kept by reversible operloop over vanilla, {blocks} blocks x {loops}", ratio, ratio, ratio, "lower")


def decoding(repeats: int, new_tokens: int = 48) -> list[Measure]:
    """With a KV cache, batch 1, over models of transformers of equal unrolled size; operations per layer."""
    small = load_config("small").model
    measures = []
    for name, config, make in (("Glm4Moe, small", small, peers.glm4_moe), ("Qwen3, dense", dense(), peers.qwen3)):
        prompt = torch.randint(config.vocab_size, (1, 64))
        calls = {
            "ours": _decode(_ours(config), prompt, new_tokens),
            "theirs": _decode(make(config), prompt, new_tokens),
        }
        measures.append(_speed(f"decoding speed over {name}, batch 1", calls, repeats))
    operations = count_operations(_ours(small), torch.randint(small.vocab_size, (1, 64))) / len(Layout.of(small).layers)
    name = "operations per unrolled layer in decoding"
    return [*measures, Measure(name, operations, operations, operations, "lower")]


def prefill(repeats: int, tokens: int = 768) -> list[Measure]:
    """Reading a prompt into a cache: `small` over Glm4Moe of transformers of equal unrolled size."""
    config = load_config("small").model
    prompt = torch.randint(config.vocab_size, (1, tokens))
    models = {"ours": _ours(config), "theirs": peers.glm4_moe(config)}
    calls = {name: peers.prefill_call(model, prompt) for name, model in models.items()}
    return [_speed(f"prefill speed over Glm4Moe, small, {tokens} tokens", calls, repeats)]


def training_peers(repeats: int, rows: int = 4, length: int = 256) -> list[Measure]:
    """Forward and backward over models of equal unrolled size; open-mythos only where it is installed."""
    mythos = ModelConfig(**peers.MYTHOS)
    pairs = {
        "Qwen3, dense": (dense(), peers.qwen3(dense())),
        "Glm4Moe, small": (load_config("small").model, peers.glm4_moe(load_config("small").model)),
        "open-mythos": (mythos, peers.open_mythos(mythos)),
    }
    measures = []
    for name, (config, theirs) in pairs.items():
        if theirs is not None:
            tokens = torch.randint(config.vocab_size, (rows, length))
            models = {"ours": LoopedLM(config, seed=0), "theirs": theirs.train()}
            calls = {whose: peers.training_call(model, tokens) for whose, model in models.items()}
            measures.append(_speed(f"training speed over {name}", calls, repeats))
    return measures


def memory(repeats: int) -> list[Measure]:
    """What is kept for the backward, counted."""
    sizes = (2, 3), (2, 12), (4, 12)
    return [*(saved_words(reversible=each) for each in (False, True)), *(kept_memory(*size) for size in sizes)]


SUITE: dict[str, Callable[[int], list[Measure]]] = {
    "transition": transition,
    "compiled": compiled,
    "optimizer": optimizer,
    "memory": memory,
    "decoding": decoding,
    "prefill": prefill,
    "peers": training_peers,
    "compiling": compiling,
}
"""The groups of the suite."""


def dense() -> ModelConfig:
    """A dense model of the width of `small`."""
    return ModelConfig(**peers.DENSE)


def _ours(config: ModelConfig) -> LoopedForCausalLM:
    return LoopedForCausalLM.from_looped(LoopedLM(config, seed=0)).eval()


def _decode(model: Any, prompt: Tensor, new_tokens: int) -> Callable[[], Any]:
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    return torch.inference_mode()(lambda: model.generate(prompt, **options))


def _speed(name: str, calls: dict[str, Callable[[], Any]], repeats: int) -> Measure:
    """Their time over ours, round by round."""
    times = rounds(calls, repeats, "cpu")
    return Measure(name, *quartiles([turn["theirs"] / turn["ours"] for turn in times]), "higher")


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[function._schema.name.rpartition("::")[2]] += 1
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def count_operations(model: LoopedForCausalLM, prompt: Tensor) -> int:
    """The operations of one decode step, views left out."""
    lay_together(model)
    cache = model(prompt, use_cache=True).past_key_values
    with _Operations() as seen:
        model(prompt[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return sum(number for name, number in seen.names.items() if name not in VIEWS)
