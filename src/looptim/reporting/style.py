"""How lines look: colors, dashes and markers of transitions and runs, and what every figure shares."""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Sequence
from typing import Any

from matplotlib.colors import to_hex, to_rgb

RC: Any = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    # With a fixed salt, equal figures have equal bytes.
    "svg.hashsalt": "looptim",
}

COLORS = {
    "none": "#000000",
    "vanilla": "#8c8c8c",
    "huginn": "#b8a900",
    "parcae": "#009e73",
    "full_bandwidth": "#e69f00",
    "recurrentgpt": "#56b4e9",
    "recirculation": "#cc79a7",
    "damped": "#6a3d9a",
    "hyperloop": "#0072b2",
    "operloop": "#d55e00",
    "operloop_heavyball": "#56b4e9",
    "operloop_nesterov": "#0072b2",
    "operloop_muon": "#009e73",
    "operloop_hyperball": "#cc79a7",
    "operloop_bounded": "#e69f00",
    "operloop_robust": "#000000",
}
"""Okabe and Ito's palette plus gray, with a darker yellow for white paper; relatives of operloop share no color."""

LINESTYLES: tuple[Any, ...] = (
    "-",
    (0, (4, 1.5)),
    (0, (1, 1.2)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (8, 2, 1, 2, 1, 2)),
    (0, (2, 3)),
)
MARKERS = "osD^vP"
MUTED = "#444444"
PALE: dict[str, Any] = {"alpha": 0.3, "linewidth": 0.6}
STEPS = (1, 2, 2.5, 5, 10)


def color_of(name: str) -> str:
    """The color of a transition in every figure; an aligned twin has its sibling's, an unknown name a fixed one.

    >>> color_of("hyperloop_aligned") == color_of("hyperloop")
    True
    """
    name = name.removesuffix("_aligned")
    if name in COLORS:
        return COLORS[name]
    palette = sorted(set(COLORS.values()) - {COLORS["none"], COLORS["vanilla"], COLORS["operloop"]})
    return palette[zlib.crc32(name.encode()) % len(palette)]


def style_of(name: str) -> dict[str, Any]:
    """Color, line style and marker of a transition; an aligned twin is dashed and square."""
    twin = name.endswith("_aligned")
    return {"color": color_of(name), "linestyle": LINESTYLES[twin], "marker": MARKERS[twin]}


def _onwards(linestyle: Any) -> list[int]:
    """The indices of all line styles, starting at this one."""
    first = LINESTYLES.index(linestyle)
    return [(first + step) % len(LINESTYLES) for step in range(len(LINESTYLES))]


def styles_of(presets: Sequence[str]) -> list[dict[str, Any]]:
    """A style for each run, by its transition; its second run gets another shade and dash.

    Shades of a color tell three apart; where there are more of one transition, they have colors of their own.
    """
    # The two that everything is compared with come last, because readers know their colors.
    known = (COLORS["none"], COLORS["vanilla"])
    spare = sorted(dict.fromkeys(COLORS.values()), key=known.__contains__)
    others = [color for color in spare if color not in map(color_of, presets)] or spare
    styles, seen, taken = [], dict.fromkeys(presets, 0), set()
    for preset in presets:
        again, style = seen[preset], style_of(preset)
        seen[preset] += 1
        if again and presets.count(preset) > 3:
            place = again % len(LINESTYLES)
            style = {
                "color": others[(again - 1) % len(others)],
                "linestyle": LINESTYLES[place],
                "marker": MARKERS[place],
            }
        elif again:
            hue, light, saturation = colorsys.rgb_to_hls(*to_rgb(style["color"]))
            light = light * 0.6**again if again % 2 else 1 - (1 - light) * 0.7**again
            dash = (2 * again + preset.endswith("_aligned")) % len(LINESTYLES)
            style = {
                "color": to_hex(colorsys.hls_to_rgb(hue, light, saturation)),
                "linestyle": LINESTYLES[dash],
                "marker": MARKERS[dash],
            }
        # Two transitions may share a color; the later one gets another dash.
        free = [place for place in _onwards(style["linestyle"]) if (style["color"], place) not in taken]
        place = free[0] if free else LINESTYLES.index(style["linestyle"])
        taken.add((style["color"], place))
        styles.append(style | {"linestyle": LINESTYLES[place], "marker": MARKERS[place]})
    return styles


def dash_of(linestyle: Any) -> list[float]:
    """A line style for the page: alternating lengths of drawn and blank pixels.

    >>> dash_of((0, (4, 1.5)))
    [8.0, 3.0]
    """
    return [] if linestyle == "-" else [2.0 * length for length in linestyle[1]]
