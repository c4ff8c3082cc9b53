"""The outputs of the models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass
class LoopedModelOutput(BaseModelOutputWithPast):
    """The output of the body, plus the auxiliary loss of its MoE layers without its coefficient."""

    aux_loss: Float[Tensor, ""] | None = None
    depth: tuple[Int[Tensor, "B T"], ...] | None = None
    """How many steps each new token took in each loop, if tokens may leave."""


@dataclass
class LoopedCausalLMOutput(MoeCausalLMOutputWithPast):
    """The output of the model with a head."""

    depth: tuple[Int[Tensor, "B T"], ...] | None = None
    """How many steps each new token took in each loop, if tokens may leave."""
