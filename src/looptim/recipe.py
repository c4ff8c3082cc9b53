"""From a recipe, which is a TOML file with a base and overrides, to a config."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from .base.choices import nearest
from .base.code import allow
from .config import Config, shape_of


def shipped(kind: str) -> dict[str, Path]:
    """The shipped files, `recipes` or `studies`, by name: `nano`, `paper/18/loop3-operloop`."""
    folder = Path(__file__).parent / kind
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.toml"))}


def summary(path: Path) -> str:
    """What a shipped file says about itself: its leading comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    return " ".join(comment)


def find_file(kind: str, name: str | Path) -> Path:
    """The file of a recipe or study, given by path or by the name of a shipped one."""
    path, known = Path(name), shipped(kind)
    if path.is_file():
        return path
    if str(name) in known:
        return known[str(name)]
    what = {"recipes": "recipe", "studies": "study"}[kind]
    hint = nearest(path.with_suffix("").as_posix().removeprefix(f"{kind}/"), known)
    raise ValueError(
        f"there is no {what} {str(name)!r}{hint} give the path of a TOML file or a shipped name, "
        f"one of {', '.join(sorted({each.partition('/')[0] + ('/...' if '/' in each else '') for each in known}))}"
    )


def load_config(path: str | Path, set: Iterable[str] = ()) -> Config:
    """A recipe by its name or from a TOML file, with `a.b=c` overrides from `set`.

    A file may have a `base = "other.toml"`, relative to the file, or `base = "nano"`, a shipped recipe, which it
    overrides; a base may have one too.

    >>> load_config("nano", set=["loop.preset=vanilla"]).model.layout
    '1-2x3-1'
    """
    set = [set] if isinstance(set, str) else list(set)
    # A preset that is set here is named by the caller, not by a file.
    allow(str(_table(_overrides(set), ("model", "loop")).get("preset")))
    return read_config(path, set)


def read_config(path: str | Path, set: Iterable[str] = ()) -> Config:
    """`load_config` with overrides that may come from a file, as a study's do; it allows no code to run."""
    path = find_file("recipes", path)
    values = _on_top(_with_base(path), _overrides(set))
    try:
        return Config(**_of_decoder(values))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _of_decoder(values: dict[str, Any]) -> dict[str, Any]:
    """The tables of a recipe that trains a decoder of transformers, with what its folder tells."""
    folder = _table(values, ("pretrained",)).get("folder")
    if not isinstance(folder, str):
        return values
    # The recipe of a run has it all, and the folder may be gone.
    if "width" in _table(values, ("model",)) and not Path(folder).expanduser().is_dir():
        return values
    return _on_top({"model": shape_of(folder), "data": {"tokenizer": folder}}, values)


def change(config: Config, set: Iterable[str]) -> Config:
    """The same recipe with `a.b=c` overrides.

    >>> change(load_config("nano"), ["optim.lr=0.01"]).optim.lr
    0.01
    """
    return Config(**_on_top(config.model_dump(), _overrides(set)))


def _overrides(set: Iterable[str]) -> dict[str, Any]:
    """Merge overrides into one, so that options may be set before or after the preset they belong to."""
    merged: dict[str, Any] = {}
    for text in [set] if isinstance(set, str) else set:
        merged = _merge(merged, _loop_in_model(parse_override(text)))
    return merged


class Key(NamedTuple):
    """A key of a recipe."""

    name: str
    type: str
    default: str
    meaning: str


def keys() -> list[Key]:
    """Every key of a recipe, in the order of the configs.

    >>> next(key for key in keys() if key.name == "train.seed")[1:3]
    ('int', '0')
    """
    return [key._replace(name=key.name.replace("model.loop.", "loop.")) for key in _keys(Config, "")]


def _keys(config: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
            default = "required" if field.is_required() else value_text(field.default)
            yield Key(prefix + name, re.sub(r"typing\.|NoneType", "", kind), default, field.description or "")


def values_of(config: Config) -> dict[str, str]:
    """The value of every key in a config, as a recipe would write it."""
    return {key.name: value_text(_value(config, key.name)) for key in keys()}


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.replace("loop.", "model.loop.", name.startswith("loop.")).split("."):
        value = getattr(value, part)
    return value


def value_text(value: Any) -> str:
    """A value as a recipe writes it; an optional key without a value is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _with_base(path: Path, askers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of a file on top of those of its base; `askers` are the files that led here, the last one first."""
    if path.resolve() in (asker.resolve() for asker in askers):
        raise ValueError(f"{askers[0]}: its base {str(path)!r} leads back to itself; leave one of the bases out")
    try:
        values = _loop_in_model(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    name = values.pop("base", None)
    if name is None:
        return values
    if not isinstance(name, str):
        raise ValueError(f"{path}: base must be the path of another recipe, got {name!r}")
    return _on_top(_with_base(find_base(path, name), (path, *askers)), values)


def find_base(path: Path, name: str) -> Path:
    """The base of a recipe or a study: a path relative to its file, or the name of a shipped recipe."""
    beside = path.parent / name
    found = beside if beside.is_file() else shipped("recipes").get(name)
    if found is None:
        raise ValueError(
            f"{path}: its base {str(beside)!r} does not exist; give the path of a TOML file or a shipped name"
        )
    return found


def _loop_in_model(values: dict[str, Any]) -> dict[str, Any]:
    """A file has a separate table for the transition; in the config it is a part of the model."""
    if "loop" not in values:
        return values
    return _merge({k: v for k, v in values.items() if k != "loop"}, {"model": {"loop": values["loop"]}})


def _on_top(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`. Options belong to a preset or a source, so another one starts without them."""
    merged = _merge(base, over)
    for path, name in ((("model", "loop"), "preset"), (("data",), "source")):
        before, after, both = (_table(values, path) for values in (base, over, merged))
        if name in after and after[name] != before.get(name) and "options" in both:
            both["options"] = after.get("options", {})
    if "mixture" in _table(over, ("data",)):
        _table(merged, ("data",))["mixture"] = _table(over, ("data",))["mixture"]
    return merged


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        inner = values.get(key)
        values = inner if isinstance(inner, Mapping) else {}
    return values


def _merge(base: Any, over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, table by table, copying the tables."""
    merged = dict(base) if isinstance(base, Mapping) else {}
    for key, value in over.items():
        merged[key] = _merge(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=c` as nested tables; the value is TOML if it parses, else a string. `a.b=` unsets the key."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"--set {text!r} must have the form key=value, as in --set loop.preset=hyperloop")
    parsed: Any = None
    try:
        if value.strip():
            parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return parsed
