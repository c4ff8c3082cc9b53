"""The base of every config: typed and frozen, with errors that name the nearest known key."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..base.choices import nearest


class Strict(BaseModel):
    """A frozen config that forbids unknown keys and words its errors in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    recipe_keys: ClassVar[tuple[str, ...]] = ()
    """More keys that a recipe may have at this place; they are resolved before the config is built."""

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(_one_line(error, type(self))) from None


def _one_line(error: ValidationError, config: type[Strict]) -> str:
    """The first error, in one line: where it is, what was given, and what to do."""
    errors = error.errors()
    # A misspelled key also makes the key that was meant look missing, so it is reported first.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        known = [*config.model_fields, *config.recipe_keys]
        return f"unknown key {where!r}{nearest(where, known)} known: {', '.join(known)}"
    if first["type"] == "missing":
        return f"{where} is missing; give it a value"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{where}: {message}" if where and not message.startswith(where) else message
    return f"{where}: {message[0].lower()}{message[1:]}, got {first['input']!r}"
