"""The figure of which layers of a pretrained model to loop."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from ..hf.choose import LayerChoice
from .style import RC


def draw_layers(choice: LayerChoice, out: str | Path) -> Path:
    """Influence, angular distance and contraction over the depth of a model, the recommended window shaded."""
    out = Path(out)
    panels = {
        "Block influence of a layer": choice.influence,
        f"Angular distance over {choice.size} layers": choice.angle,
        f"Second pass over first, {choice.size} layers": choice.contraction,
    }
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(7, 6), layout="constrained")
        rows = figure.subplots(3, 1, sharex=True)
        for axes, (title, values) in zip(rows, panels.items(), strict=True):
            axes.plot(range(len(values)), values, marker="o", markersize=3, color="#0072b2")
            axes.axvspan(choice.best - 0.4, choice.best + choice.size - 0.6, color="#d55e00", alpha=0.15)
            axes.set_title(title)
            axes.set_yscale("log")
        rows[-1].set_xlabel("first layer")
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    return out
