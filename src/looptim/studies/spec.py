"""A study's TOML file, and the grid of runs it stands for."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import AfterValidator, Field, model_validator

from ..config import Config, Strict, TrainConfig
from ..loop.registry import NUMERICS, code_of
from ..model.count import Count, count, training_flops
from ..recipe import change, find_base, find_file, read_config
from ..training.maker import check_model
from .phi_grid import PhiGrid

VERSION = {} if NUMERICS == 1 else {"numerics": NUMERICS}
"""What looptim computes, as a part of what a run is; the first version is in no name, since the first runs had none."""
TOLERANCE = {"tokens": 0.02, "flops": 0.01}
"""How far the training FLOPs of a variant may be from the reference's, by what the variants are given equally much of.
"""

OWN = {"train.steps": "tokens", "loop": "variants", "model.loop": "variants"}
"""Keys of a recipe that a study sets itself, and what it sets them from."""
OWN_OF_VARIANT = {"train.steps": "budget", "loop.preset": "preset", "model.layout": "layout"}
"""The same for the changes of one variant."""
COMMON = ("data", "train.batch_size", "train.seq_len")
"""Keys that must have the same value in all variants."""
VARIED = {"both": ("train.seed", "train.data_seed"), "weights": ("train.seed",), "data": ("train.data_seed",)}
"""Keys that are set from a study's seeds, by what the seeds vary."""


def _each_once(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds {list(seeds)} name one twice; give each once")
    return seeds


Trials = dict[str, tuple[bool | int | float | str, ...]]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], AfterValidator(_each_once)]


class Variant(Strict):
    """A variant to compare: a transition, and a layout if it is not the base's."""

    preset: str
    options: dict[str, Any] = Field({})
    noncausal: bool = Field(False, description="Train it although a token sees later ones or other sequences.")
    layout: str | None = None
    set: tuple[str, ...] = Field((), description="Its own changes to the base, as key=value: of model, optim or train.")
    budget: float = Field(1.0, gt=0, description="Of the study's tokens.")
    trials: Trials | None = Field(None, description="What it is tuned over, where that is not what the others are.")
    against: str | None = Field(None, description="Another variant it is also compared with, such as its twin.")


class Tuning(Strict):
    """Trials before the runs that are reported: every variant keeps the values of its best one.

    Every variant has equally many trials, by the validation loss on seeds and held-out documents of their own.
    """

    seeds: Seeds = Field(min_length=1)
    tokens: int | None = Field(None, ge=1, description="The budget of a trial, where it is not that of a run.")
    set: tuple[str, ...] = Field(("data.valid_fold=1",), description="What gives it held-out documents of its own.")
    trials: Trials = Field(description="Values of keys, every combination a trial.")


class Scale(Strict):
    """The same study at another size; what it does not say is the study's."""

    base: str | None = None
    tokens: int | None = Field(None, ge=1)
    seeds: Seeds | None = Field(None, min_length=1)
    match: Literal["tokens", "flops"] | None = None
    matched: bool | None = None
    set: tuple[str, ...] | None = None


class Study(Strict):
    """A study file. `base` is the path of a recipe, seen from the file, or the name of a shipped one."""

    title: str
    base: str
    tokens: int = Field(ge=1, description="The budget of every run.")
    seeds: Seeds = Field(min_length=1)
    vary: Literal["both", "weights", "data"] = Field(
        "both", description="What a seed changes: the initial weights, the order of the data, or both at once."
    )
    reference: str = Field(description="The variant the others are compared with.")
    match: Literal["tokens", "flops"] = Field(
        "tokens", description="What the budget is in: tokens, or the training FLOPs of so many of the reference's."
    )
    matched: bool = Field(True, description="Whether training FLOPs must agree.")
    set: tuple[str, ...] = Field((), description="Changes to the base, as key=value.")
    variants: dict[str, Variant] = Field(min_length=1)
    tune: Tuning | None = None
    exits: bool = Field(False, description="Whether thresholds are chosen in every run at which tokens leave its loop.")
    phi: PhiGrid | None = Field(None, description="The variants as a grid that the exponent of loops is fitted to.")
    scales: dict[str, Scale] = Field({})

    @model_validator(mode="after")
    def _names_fit_together(self) -> Study:
        if self.reference not in self.variants:
            raise ValueError(f"reference {self.reference!r} is no variant; known: {', '.join(self.variants)}")
        for name, variant in self.variants.items():
            if variant.against is not None and variant.against not in self.variants.keys() - {name}:
                raise ValueError(f"variant {name!r} is against {variant.against!r}, which is no other variant")
            if self.tune is None and variant.trials is not None:
                raise ValueError(f"variant {name!r} has trials, but the study has no [tune]")
        return self


@final
@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    variant: str
    seed: int
    config: Config
    code: str | None = None
    """The hash of the source of a preset that is the user's own."""
    exits: bool = False
    """Whether thresholds are chosen at which tokens leave its loop: asked of the run, not a part of what it is."""

    @property
    def name(self) -> str:
        """The name of its folder: equal configs and equal code have equal names, so that studies can share runs."""
        values = self.config.model_dump(mode="json", exclude_defaults=True)
        values |= VERSION | ({} if self.code is None else {"code": self.code})
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
        # Of `folder/file.py:function` the last two words say enough, and the digest tells it from others.
        place, _, preset = self.config.model.loop.preset.rpartition(":")
        words = re.sub(r"[^\w=+,@-]+", "-", f"{Path(place).stem}-{preset}" if place else preset)[:64]
        return f"{words}_{self.config.model.layout}_s{self.seed}_{digest}"


@final
@dataclasses.dataclass(frozen=True)
class Plan:
    """A study with everything resolved: what is run, and what it costs."""

    name: str
    study: Study
    cells: list[Cell]
    """Seed by seed, so that what is there is comparable from the first seed on."""
    counts: dict[str, Count]
    costs: dict[str, float]
    """Training FLOPs of a token."""
    notes: tuple[str, ...] = ()
    """What a reader of its tables is to know besides."""

    def config(self, variant: str) -> Config:
        """The config of a variant's run with the first seed."""
        return next(cell.config for cell in self.cells if cell.variant == variant)

    @property
    def tokens(self) -> int:
        """The tokens that a run of the reference is trained on: the budget in whole updates."""
        return self.tokens_of(self.study.reference)

    @property
    def held(self) -> int:
        """The seed of what the seeds of the study do not vary."""
        settings = self.cells[0].config.train
        return settings.seed if self.study.vary == "data" or settings.data_seed is None else settings.data_seed

    def flops(self, variant: str) -> float:
        """Training FLOPs of a run, relative to the reference's."""
        ours, theirs = (self.costs[name] * self.tokens_of(name) for name in (variant, self.study.reference))
        return ours / theirs

    def tokens_of(self, variant: str) -> int:
        """The tokens that a run of a variant is trained on."""
        settings = self.config(variant).train
        return settings.steps * settings.batch_size * settings.seq_len

    def identity(self) -> dict[str, Any]:
        """What identifies the study: the budget, the reference and every variant's config, whatever the seeds."""
        variants = {}
        for name in self.study.variants:
            values = self.config(name).model_dump(mode="json")
            values["train"] = {k: v for k, v in values["train"].items() if k not in ("seed", "data_seed")}
            variants[name] = values
        held = {} if self.study.vary == "both" else {"vary": self.study.vary, "held": self.held}
        codes = {cell.variant: cell.code for cell in self.cells if cell.code is not None}
        code = {"code": codes} if codes else {}
        of = {"study": self.name, "reference": self.study.reference, **VERSION}
        return {**of, **held, **code, "variants": variants}


def load_plan(path: str | Path, *, scale: str | None = None, set: Iterable[str] = (), only: Iterable[str] = ()) -> Plan:
    """The grid of a study file; every variant is built, on the meta device, and its FLOPs are compared."""
    path = find_file("studies", path)
    return make_plan(
        path, narrowed(_scaled(path, _read(path), scale), [only] if isinstance(only, str) else only), set=set
    )


def narrowed(study: Study, only: Iterable[str]) -> Study:
    """The study of the variants (of phi: the transitions) that match a pattern, and of what they are compared with."""
    patterns = list(only)
    if not patterns:
        return study
    names = study.variants if study.phi is None else study.phi.transitions
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"only {pattern!r} matches none of the study's; it has: {', '.join(names)}")
    wanted = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    if study.phi is not None:
        looped = {name: each for name, each in study.phi.transitions.items() if name in wanted}
        phi = study.phi.model_copy(update={"transitions": looped})
        wanted, study = {member.name for member in phi.members()}, study.model_copy(update={"phi": phi})
    wanted.add(study.reference)
    while twins := {name for each in wanted if (name := study.variants[each].against) is not None} - wanted:
        wanted |= twins
    return study.model_copy(update={"variants": {name: v for name, v in study.variants.items() if name in wanted}})


def _scaled(path: Path, study: Study, scale: str | None) -> Study:
    if scale is not None:
        if scale not in study.scales:
            known = f"it has: {', '.join(study.scales)}" if study.scales else "it has none"
            raise ValueError(f"{path} has no scale {scale!r}; {known}")
        study = study.model_copy(update=study.scales[scale].model_dump(exclude_none=True))
    return study


def make_plan(path: Path, study: Study, *, set: Iterable[str] = ()) -> Plan:
    """The grid of a study that was read from `path`."""
    changes = [*study.set, *([set] if isinstance(set, str) else set)]
    layouts = all(variant.layout for variant in study.variants.values())
    _check_changes(changes, study, {**OWN, **({"model.layout": "variants"} if layouts else {})})
    # The base's own length is not that of a run: changes must fit what `_config` makes of it, and are checked there.
    base = read_config(find_base(path, study.base), set=[*changes, f"train.steps={study.tokens}"])
    configs = {name: _config(base, study, name) for name in study.variants}
    counts = _counts(configs)
    costs = {name: cost for name, (_, cost) in counts.items()}
    if study.match == "flops":
        worth = {name: costs[study.reference] / cost for name, cost in costs.items()}
        configs = {name: _config(base, study, name, worth=worth[name]) for name in study.variants}
    codes = {name: code_of(config.model.loop.preset) for name, config in configs.items()}
    cells = [
        Cell(
            name,
            seed,
            config.model_copy(update={"train": _seeded(config.train, study.vary, seed)}),
            codes[name],
            study.exits,
        )
        for seed in study.seeds
        for name, config in configs.items()
    ]
    plan = Plan(path.stem, study, cells, {name: counted for name, (counted, _) in counts.items()}, costs)
    if study.matched:
        _check_matched(plan)
    return plan


def _seeded(settings: TrainConfig, vary: str, seed: int) -> TrainConfig:
    """The settings of a seed: what it does not vary keeps the seed of the base."""
    held = settings.seed if vary == "data" or settings.data_seed is None else settings.data_seed
    weights, data = {"both": (seed, seed), "weights": (seed, held), "data": (held, seed)}[vary]
    # A run whose two seeds agree is the same run, under the same name, whatever the study varies.
    return settings.model_copy(update={"seed": weights, "data_seed": None if data == weights else data})


def _read(path: Path) -> Study:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        if "phi" in values:
            grid = PhiGrid(**values["phi"])
            values |= {"variants": grid.variants(), "reference": grid.members()[0].name}
        return Study(**values)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_changes(changes: Iterable[str], study: Study, own: Mapping[str, str]) -> None:
    """Refuse a change that the study would overwrite, instead of silently ignoring it."""
    own = {**own, **dict.fromkeys(VARIED[study.vary], "seeds")}
    for text in changes:
        for key, source in own.items():
            if f"{text.partition('=')[0].strip()}.".startswith(f"{key}."):
                raise ValueError(f"set {text!r} would change nothing: a study has {key} from its {source}; edit those")


def _config(base: Config, study: Study, name: str, *, worth: float = 1.0) -> Config:
    """The config of a variant, one of whose tokens is `worth` this many of those that the budget counts."""
    variant = study.variants[name]
    values = base.model_dump()
    values["model"]["loop"] = variant.model_dump(include={"preset", "options", "noncausal"})
    values["model"]["layout"] = variant.layout or base.model.layout
    budget = variant.budget * study.tokens * worth
    values["train"]["steps"] = max(1, round(budget / (base.train.batch_size * base.train.seq_len)))
    try:
        _check_changes(variant.set, study, {**OWN_OF_VARIANT, **dict.fromkeys(COMMON, "base, the same for all")})
        return change(Config(**values), variant.set)
    except ValueError as error:
        raise ValueError(f"variant {name!r}: {error}") from None


def _counts(configs: Mapping[str, Config]) -> dict[str, tuple[Count, float]]:
    """What every variant has and costs, and that it builds.

    A model is counted once, whatever budget or rate it comes with, and a transition looked into once, whatever model.
    """
    looked_into: set[str] = set()
    counted: dict[str, tuple[Count, float]] = {}
    counts = {}
    for name, config in configs.items():
        loops = config.train.loops.model_dump_json()
        transition, model = config.model.loop.model_dump_json() + loops, config.model.model_dump_json() + loops
        try:
            if transition not in looked_into:
                check_model(config)
            if model not in counted:
                counted[model] = count(config), training_flops(config)
        except ValueError as error:
            raise ValueError(f"variant {name!r} does not build: {error}") from None
        looked_into.add(transition)
        counts[name] = counted[model]
    return counts


def _check_matched(plan: Plan) -> None:
    study, tolerance, spent = plan.study, TOLERANCE[plan.study.match], plan.costs
    if study.match == "flops":
        # A variant that is given another budget is meant to take more or fewer.
        spent = {name: plan.flops(name) / variant.budget for name, variant in study.variants.items()}
    ratios = {name: each / spent[study.reference] for name, each in spent.items()}
    off = [name for name in study.variants if abs(ratios[name] - 1) > tolerance]
    if off:
        cure = "change their layouts, write match = 'flops'" if study.match == "tokens" else "give more tokens"
        raise ValueError(
            f"training FLOPs more than {tolerance:.0%} off those of {study.reference!r}: "
            f"{', '.join(f'{name!r} takes {ratios[name]:.3f} times as many' for name in off)}; "
            f"{cure}, or write matched = false into the study"
        )
