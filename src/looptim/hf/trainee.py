"""A pretrained decoder, looped, as looptim's own trainer trains it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from ..config import Config
from ..loop import Depth
from ..model import IGNORE, Output, document_starts
from ..rundir import RunDir
from ..training import checkpoint
from ..training.distributed import World
from ..training.maker import check_origin
from .decoder import LoopedDecoder
from .loop_model import loop_model
from .opening import open_folder


class Trainee(nn.Module):
    """A decoder with the `loss` of a `LoopedLM`. Its state is what is trained: the rest is in the base's folder.

    With `distill = w` the loss is `(1 - w) CE + w T^2 KL(base || model)`, both at the temperature T.
    """

    def __init__(self, decoder: nn.Module, teacher: PreTrainedModel | None, config: Config):
        super().__init__()
        self.decoder = decoder
        # As a child the teacher would be saved, moved and trained with the model.
        self.__dict__["teacher"] = teacher
        self.settings = config.pretrained
        self.train()

    @property
    def looped(self) -> PreTrainedModel:
        """The decoder without its adapters' wrapper."""
        return cast(Any, self.decoder).get_base_model() if self._adapted else cast(PreTrainedModel, self.decoder)

    @property
    def _adapted(self) -> bool:
        return hasattr(self.decoder, "peft_config")

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits in fp32."""
        return self.decoder(input_ids=tokens, use_cache=False).logits.float()

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        documents: Tensor | None = None,
        depth: Depth | None = None,
        grad_loops: int | None = None,
        early_weight: float = 1.0,
    ) -> Output:
        """Mean cross entropy of the targets, and with a teacher the distance from it."""
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if documents is not None:
            # Transformers tells packed documents apart by positions that begin anew.
            given["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device) - document_starts(documents)
        with self._at(depth, grad_loops):
            logits = self.decoder(**given).logits.float()
        counted = (targets != IGNORE).sum().clamp_min(1)
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / counted
        loss = cross_entropy
        if self.__dict__["teacher"] is not None and self.training:
            with torch.no_grad():
                expected = self.__dict__["teacher"](**given).logits.float()
            share = self.settings.distill
            loss = (1 - share) * cross_entropy + share * self._distance(logits, expected, targets) / counted
        return Output(loss, cross_entropy, loss, {})

    def _distance(self, logits: Tensor, expected: Tensor, targets: Tensor) -> Tensor:
        """The summed Kullback-Leibler divergence where there are targets."""
        heat = self.settings.temperature
        ours, theirs = (each[targets != IGNORE].div(heat).log_softmax(-1) for each in (logits, expected))
        return heat**2 * F.kl_div(ours, theirs, reduction="sum", log_target=True)

    @contextmanager
    def _at(self, depth: Depth | None, grad_loops: int | None) -> Iterator[None]:
        """The decoder at another depth; a recomputation in the backward has kept what it needs of it."""
        if depth is None and grad_loops is None:
            yield
            return
        looped = cast(Any, self.looped)
        looped.set_depth(depth, grad_steps=grad_loops)
        try:
            yield
        finally:
            looped.set_depth(None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What is trained; all of it belongs to the weights of the base, whose hash a run records."""
        trained = {name for name, parameter in self.named_parameters(remove_duplicate=False) if parameter.requires_grad}
        whole = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in whole.items() if name in trained}

    @property
    def checkpointing(self) -> bool:
        """Whether layers are recomputed in the backward."""
        return cast(bool, self.looped.is_gradient_checkpointing)

    @checkpointing.setter
    def checkpointing(self, enable: bool) -> None:
        if enable:
            self.looped.gradient_checkpointing_enable()

    def merged(self) -> PreTrainedModel:
        """The decoder with its adapters added to the weights."""
        return cast(Any, self.decoder).merge_and_unload() if self._adapted else self.looped


def build_trainee(config: Config) -> Trainee:
    """The decoder of a recipe, looped, with what is to be trained of it; the seed draws what is new."""
    settings = config.pretrained
    assert settings.folder is not None
    base = open_folder(settings.folder, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        decoder = _loop(base, config)
        looped = isinstance(decoder, LoopedDecoder)
        teacher = None
        if settings.distill:
            if isinstance(base, LoopedDecoder):
                raise ValueError(
                    f"pretrained.distill needs the base, and {settings.folder} holds a looped decoder; give the folder "
                    "it was looped from, and the layout"
                )
            # Weights that are not trained are those of the base, and stay there.
            teacher = (copy.deepcopy(base) if settings.weights == "all" else base).eval().requires_grad_(False)
        model = Trainee(_choose_weights(decoder, config, looped=looped), teacher, config)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"pretrained.weights={settings.weights!r} leaves nothing to train: {config.model.loop.preset} has no "
            "parameters; choose lora or all"
        )
    return model


def _loop(base: PreTrainedModel, config: Config) -> PreTrainedModel:
    """The decoder with the loops of the recipe, or as it is where there are none."""
    model, known = config.model, base.config
    for name, theirs in {"width": known.hidden_size, "vocab_size": known.vocab_size}.items():
        if getattr(model, name) != theirs:
            raise ValueError(f"model.{name} is {getattr(model, name)}, but the decoder in the folder has {theirs}")
    if isinstance(base, LoopedDecoder):
        if (known.layout, known.loop["preset"]) != (model.layout, model.loop.preset):
            raise ValueError(
                f"{config.pretrained.folder} is looped already, as {known.layout} by {known.loop['preset']}; leave "
                "model.layout and loop out, or give the folder it was looped from"
            )
        return base
    if all(segment.loops is None for segment in model.segments):
        if sum(segment.blocks for segment in model.segments) != known.num_hidden_layers:
            raise ValueError(f"model.layout is {model.layout}, but the decoder has {known.num_hidden_layers} layers")
        return base
    return loop_model(base, model.layout, model.loop.preset, **model.loop.options)


def _choose_weights(decoder: PreTrainedModel, config: Config, *, looped: bool) -> nn.Module:
    """The decoder with gradients for what is trained, which may be adapters."""
    settings = config.pretrained
    if settings.weights == "all":
        return decoder.requires_grad_(True)
    if settings.weights == "transition" and not looped:
        raise ValueError("pretrained.weights='transition' needs a loop; choose lora or all, or loop some layers")
    decoder.requires_grad_(False)
    adapted: nn.Module = decoder
    if settings.weights == "lora":
        adapted = _with_adapters(decoder, config)
    if looped:
        cast(Any, decoder).loops.requires_grad_(True)
    return adapted


def _with_adapters(decoder: PreTrainedModel, config: Config) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("pretrained.weights='lora' needs peft; pip install 'looptim[peft]'") from None
    settings = config.pretrained
    head = decoder.get_output_embeddings()
    layers = [name for name, part in decoder.named_modules() if isinstance(part, nn.Linear) and part is not head]
    names = {name.rpartition(".")[2] for name in layers if ".loops." not in f".{name}"}
    unknown = sorted(set(settings.targets) - names)
    if unknown:
        raise ValueError(f"pretrained.targets has {unknown[0]!r}, but the linear layers are {', '.join(sorted(names))}")
    lora = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules=sorted(settings.targets or names))
    return get_peft_model(decoder, lora)


def load_trained(run: RunDir, config: Config) -> PreTrainedModel:
    """The decoder of a run's last checkpoint, in eval mode, its adapters merged."""
    alone = config.model_copy(update={"pretrained": config.pretrained.model_copy(update={"distill": 0.0})})
    model = build_trainee(alone)
    record = checkpoint.load_latest(run, cast(Any, model), None, World(0, 1, torch.device("cpu")))
    check_origin(config, record or {}, origin(config), run.path)
    return model.merged().eval()


@functools.cache
def _hash(path: Path, size: int, changed: int) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(1 << 24):
            digest.update(data)
    return digest.hexdigest()


def origin(config: Config) -> dict[str, Any]:
    """The hash of the weights a run begins with."""
    folder = Path(str(config.pretrained.folder)).expanduser()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"pretrained.folder {str(folder)!r} has no weights (*.safetensors); save the decoder there")
    return {"base": {file.name: _hash(file, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files}}
