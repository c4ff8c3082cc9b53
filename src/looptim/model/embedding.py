"""The embedding of tokens, or of pairs of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ModelConfig

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def build_embedding(config: ModelConfig) -> nn.Embedding:
    """The embedding of a model, with weights yet to be drawn."""
    if config.pairs and config.tied:
        raise ValueError("pairs of tokens have two embeddings and a head one set of weights; set model.tied to false")
    return (PairEmbedding if config.pairs else nn.Embedding)(config.vocab_size, config.width)


@final
class PairEmbedding(nn.Embedding):
    """`E[i] + F[j]` for the pair of tokens i and j, which is written as the number `i * vocab_size + j`.

    E and F are the two halves of `weight`.

    >>> import torch
    >>> embedding = PairEmbedding(5, 2)
    >>> (embedding(torch.tensor([13])) == embedding.weight[2] + embedding.weight[5 + 3]).all().item()
    True
    """

    def __init__(self, vocab_size: int, width: int):
        super().__init__(2 * vocab_size, width)

    def forward(self, input: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d"]:
        first, second = self.weight.chunk(2)
        return F.embedding(input // len(first), first) + F.embedding(input % len(first), second)
