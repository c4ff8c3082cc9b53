"""The framework: loop transitions made of a projection, an objective and a rule. It needs nothing but torch."""

from ..base.code import import_code
from . import (
    controls,
    depth,
    directions,
    maps,
    objectives,
    presets,
    projections,
    roadmap,
    rules,
    signals,
    state,
    training_free,
)
from .base import Context, Gate, Part
from .causality import check_causality, mixes_tokens
from .controls import Decay, Step
from .depth import Depth
from .describe import Description, describe
from .diagnose import Diagnosis, align, check_gradient, diagnose
from .directions import Direction
from .loop import Loop, LoopState
from .maps import Map
from .objectives import Objective
from .projections import MapPart, Projection
from .registry import PRESETS, build, register
from .rules import Carry, Rule
from .signals import Signal
from .trace import Trace, trace
from .transition import Record, Target, TargetBias, TargetNorm, Transition

__all__ = [
    "PRESETS",
    "Carry",
    "Context",
    "Decay",
    "Depth",
    "Description",
    "Diagnosis",
    "Direction",
    "Gate",
    "Loop",
    "LoopState",
    "Map",
    "MapPart",
    "Objective",
    "Part",
    "Projection",
    "Record",
    "Rule",
    "Signal",
    "Step",
    "Target",
    "TargetBias",
    "TargetNorm",
    "Trace",
    "Transition",
    "align",
    "build",
    "check_causality",
    "check_gradient",
    "controls",
    "depth",
    "describe",
    "diagnose",
    "directions",
    "import_code",
    "maps",
    "mixes_tokens",
    "objectives",
    "presets",
    "projections",
    "register",
    "roadmap",
    "rules",
    "signals",
    "state",
    "trace",
    "training_free",
]
