"""Optimizers: Muon with Polar Express for matrices, AdamW for the rest, their groups, schedule and clipping."""

from .groups import describe_groups, parameter_groups, role_of, set_rate
from .muon import MuonAdamW
from .schedule import clip_gradients, learning_rate

__all__ = [
    "MuonAdamW",
    "clip_gradients",
    "describe_groups",
    "learning_rate",
    "parameter_groups",
    "role_of",
    "set_rate",
]
