"""A plan for people: a table, bars of memory, the collectives, and a recommendation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .plan import PARTS, Gpu

COLUMNS = ("mesh", "peak GB", "fits", "GB between nodes", "GB through a card", "compute s", "gathering s", "travel s")
COLUMNS += ("optimizer s", "update s")
COLLECTIVES = ("mesh", "phase", "collective", "processes", "link", "count", "GB")
BAR = 60
"""The length of the longest bar, in characters."""
LETTERS = dict(zip(PARTS, "PO:GAW", strict=True))


def parse_gpu(changes: Iterable[str]) -> Gpu:
    """Parse `--gpu memory=141` and the like, on top of the defaults.

    >>> parse_gpu(["memory=141"]).memory
    141.0
    """
    values: dict[str, Any] = {}
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--gpu {text!r} must have the form key=value, as in --gpu memory=141")
        values[key.strip()] = value.strip()
    return Gpu(**values)


def name(mesh: Mapping[str, int]) -> str:
    """
    >>> name({"replicate": 8, "shard": 8, "expert": 8}), name({"replicate": 1, "shard": 64, "expert": 1})
    ('8 copies x 8, experts 8', 'FSDP 64')
    """
    kind = f"FSDP {mesh['shard']}" if mesh["replicate"] == 1 else f"{mesh['replicate']} copies x {mesh['shard']}"
    return kind if mesh["expert"] == 1 else f"{kind}, experts {mesh['expert']}"


def cells(found: Mapping[str, Any]) -> list[str]:
    """The table's row of a mesh."""
    seconds = found["seconds"]
    times = ("compute", "gathering", "tokens that travel", "optimizer", "total")
    return [
        name(found["mesh"]),
        f"{found['memory_gb']['peak']:.1f}",
        "yes" if found["fits"] else "no",
        f"{found['bytes_between_nodes'] / 1e9:.1f}",
        f"{found['bytes_through_card'] / 1e9:.1f}",
        *(f"{seconds[key]:.2f}" for key in times),
    ]


def collective_cells(found: Mapping[str, Any]) -> list[list[str]]:
    """The collectives of a mesh, with equal ones merged into one row."""
    keys = ("phase", "kind", "processes", "link", "count")
    rows = [[*(str(row[key]) for key in keys), f"{row['bytes'] / 1e9:.2f}"] for row in found["collectives"]]
    return [[name(found["mesh"]), *row] for row in rows]


def bars(answer: Mapping[str, Any]) -> str:
    """Peak memory as one bar per mesh, with a letter for each part."""
    most = max(found["memory_gb"]["peak"] for found in answer["meshes"])
    lines = [f"memory at the peak: {', '.join(f'{letter} {part}' for part, letter in LETTERS.items())}"]
    for found in answer["meshes"]:
        memory = found["memory_gb"]
        bar = "".join(letter * round(BAR * memory[part] / most) for part, letter in LETTERS.items())
        lines.append(f"{name(found['mesh']):>26} {bar} {memory['peak']:.1f} GB")
    return "\n".join(lines)


def verdict(answer: Mapping[str, Any]) -> str:
    """The recommendation."""
    mesh = answer["recommended"]
    if mesh is None:
        return f"nothing fits {answer['assumed']['memory']:g} GB; the smallest change that does: {answer['change']}"
    keys = f"--set parallel.replicate={mesh['replicate']} --set parallel.expert={mesh['expert']}"
    return f"recommended: {name(mesh)} ({keys}): as fast as any that fits, with the least traffic between nodes"
