"""The benchmarks of `looptim bench --suite`: ratios inside one run, against vanilla loops and peers of transformers."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..config import Config, ModelConfig
from ..loop import build
from ..model import Layout, LoopedLM
from ..recipe import load_config
from ..training.bench import bench, quartiles, rounds
from ..training.record import Recorder
from . import peers
from .model import LoopedForCausalLM

VIEWS = {"view", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "t", "expand", "slice", "select", "split"}
VIEWS |= {"split_with_sizes", "unbind", "permute", "alias", "detach", "_reshape_alias", "as_strided", "promote_types"}
"""Operations that compute nothing."""

COLUMNS = ("measure", "median", "quartiles", "better")


@final
@dataclasses.dataclass(frozen=True)
class Measure:
    """A ratio or a count: its median and quartiles over the rounds of one run."""

    name: str
    low: float
    median: float
    high: float
    better: str
    """`lower` or `higher`."""

    @property
    def cells(self) -> list[str]:
        """As the strings of `COLUMNS`."""
        return [self.name, f"{self.median:.3f}", f"{self.low:.3f} to {self.high:.3f}", self.better]


def suite(*, repeats: int = 9) -> list[Measure]:
    """Everything that is watched, each a ratio of two things that took turns, or a count."""
    return [
        *training(repeats),
        saved_words(reversible=False),
        saved_words(reversible=True),
        *(kept_memory(*size) for size in ((2, 3), (2, 12), (4, 12))),
        *decoding(repeats),
        *prefill(repeats),
        *training_peers(repeats),
    ]


def training(repeats: int) -> list[Measure]:
    """OperLoop over the vanilla loop: forward and backward, eager and compiled, in a study's model and in a wider."""
    measures = []
    study = load_config("study")
    compiled = study.model_copy(update={"train": study.train.model_copy(update={"compile": True})})
    cases: dict[str, Config | None] = {"study": study, "study, compiled": compiled, "width 256, K = 4": None}
    for name, config in cases.items():
        answer = bench("operloop", config, repeats=repeats)
        vanilla, operloop = answer["rows"]
        low, high = operloop["time_quartiles"]
        measures.append(Measure(f"operloop over vanilla, {name}", low, operloop["time"], high, "lower"))
        ratio = operloop["mfu"] / vanilla["mfu"]
        measures.append(Measure(f"utilization of operloop over vanilla, {name}", ratio, ratio, ratio, "higher"))
    return measures


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
    cache = model(prompt, use_cache=True).past_key_values
    with _Operations() as seen:
        model(prompt[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return sum(number for name, number in seen.names.items() if name not in VIEWS)


def processor() -> str:
    """What the measures belong to: another kind of processor has other ratios."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{platform.machine()} {model} {torch.backends.cpu.get_cpu_capability()}"


def as_json(measures: list[Measure]) -> str:
    """A baseline to compare with later."""
    listed = [dataclasses.asdict(measure) for measure in measures]
    facts = {"processor": processor(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    return json.dumps({**facts, "measures": listed}, indent=2) + "\n"


def regressions(measures: list[Measure], baseline: Path) -> list[str] | None:
    """What is worse than the baseline beyond the noise of both, a line each; None on another kind of processor."""
    try:
        known = json.loads(baseline.read_text())
        before = {each["name"]: Measure(**each) for each in known["measures"]}
        same = known["processor"] == processor()
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{baseline} is no baseline; make one with looptim bench --suite --json") from None
    if not same:
        return None
    return [line for now in measures if now.name in before for line in _compare(now, before[now.name])]


def _compare(now: Measure, before: Measure) -> list[str]:
    # Half of all rounds lie between the quartiles, so that three times their distance is beyond nearly all.
    noise = max(3 * (now.high - now.low), 3 * (before.high - before.low), 0.02 * before.median)
    worse = (now.median - before.median) * (1 if now.better == "lower" else -1)
    change = f"{before.median:.3f} -> {now.median:.3f}, noise {noise:.3f}"
    return [f"{now.name}: {change}"] if worse > noise else []
