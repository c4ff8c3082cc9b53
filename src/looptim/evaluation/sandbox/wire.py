"""Messages between the process that has a program and the one that judges it: JSON that stands for plain data only.

What arrives is never executed or looked up: a value is a number, a text, or a container of such; a function is known
by a number, under which its own process keeps it.
"""

from __future__ import annotations

import json
import numbers
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

LONGEST = 1 << 26
"""Bytes of a message; a longer one ends the conversation."""
MOST = 100_000
"""Items that are drawn from an iterator."""

_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS: dict[str, Any] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_TEXTS: dict[str, Any] = {"Fraction": Fraction, "Decimal": Decimal, "complex": complex}


def send(descriptor: int, message: Any) -> None:
    """Write a message."""
    data = json.dumps(message).encode()
    data = len(data).to_bytes(8, "big") + data
    while data:
        data = data[os.write(descriptor, data) :]


def receive(descriptor: int) -> Any:
    """Read a message; an EOFError where there is none, a ValueError where it is too long or not JSON."""
    size = int.from_bytes(_read(descriptor, 8), "big")
    if size > LONGEST:
        raise ValueError(f"a message of {size} bytes is too long")
    return json.loads(_read(descriptor, size))


def _read(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(descriptor, min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other process has ended")
        data += piece
    return bytes(data)


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """A value as JSON; `keep` numbers a function, which is all that the other process gets of it.

    >>> encode((1, {"a"}), keep=id)
    {'tuple': [1, {'set': ['a']}]}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):
        value = int(value)
        # A long number in decimal digits takes time that grows with their square.
        return value if value.bit_length() < 64 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        # Of a million numbers one must not look at each twice.
        return value if _is_plain(value) else [encode(item, keep) for item in value]
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, keep) for item in value]}
    if isinstance(value, dict):
        name = next((name for name in ("Counter", "OrderedDict") if isinstance(value, _MAPPINGS[name])), "dict")
        return {name: [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    for name, kind in _TEXTS.items():
        if isinstance(value, kind):
            return {name: str(value)}
    return _encode_rest(value, keep)


def _is_plain(items: list[Any]) -> bool:
    """Whether all are texts, or numbers that are short."""
    kinds = set(map(type, items))
    return kinds <= {str} or (kinds <= {int, float} and min(items) > -(2**63) and max(items) < 2**63)


def _encode_rest(value: Any, keep: Callable[[Any], int]) -> Any:
    # The numbers and arrays of numpy, which need not be imported here.
    if type(value).__module__ == "numpy":
        return encode(value.tolist(), keep)
    if isinstance(value, Iterator):
        return {"iterator": [encode(item, keep) for _, item in zip(range(MOST), value, strict=False)]}
    if isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())):
        return {"tuple": [encode(item, keep) for item in value]}
    if callable(value):
        return {"function": keep(value)}
    raise TypeError(f"a {type(value).__name__} cannot be judged, which is no plain data")


def decode(message: Any, function: Callable[[int], Any]) -> Any:
    """The value of what `encode` made; `function` makes a stand-in of a number.

    >>> decode({"tuple": [1, {"set": ["a"]}]}, function=print)
    (1, {'a'})
    """
    if isinstance(message, list):
        if {list, dict}.isdisjoint(map(type, message)):
            return message
        return [decode(item, function) for item in message]
    if not isinstance(message, dict):
        return message
    ((name, content),) = message.items()
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, function) for item in content)
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key, function): decode(item, function) for key, item in content})
    if name in _TEXTS:
        return _TEXTS[name](content)
    rest = {
        "int": lambda digits: int(digits, 16),
        "bytes": bytes.fromhex,
        "range": lambda ends: range(*ends),
        "function": function,
    }
    return iter([decode(item, function) for item in content]) if name == "iterator" else rest[name](content)
