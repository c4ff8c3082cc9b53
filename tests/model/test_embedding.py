"""Pairs of tokens: the sum of two embeddings, in the whole model."""

import pytest
import torch
from support import config

import looptim as lo
from looptim.config import ModelConfig
from looptim.data import Tokenizer
from looptim.model.embedding import PairEmbedding
from looptim.model.lm import LoopedLM
from looptim.training.maker import check_model
from looptim.training.optim.groups import parameter_groups


def test_a_pair_is_the_sum_of_its_two_embeddings():
    embedding = PairEmbedding(7, 4)
    first, second = torch.tensor([[0, 6, 3]]), torch.tensor([[5, 0, 6]])
    both = (
        torch.nn.Embedding(7, 4, _weight=embedding.weight[:7]),
        torch.nn.Embedding(7, 4, _weight=embedding.weight[7:]),
    )
    assert torch.equal(embedding(7 * first + second), both[0](first) + both[1](second))


def test_a_model_of_pairs_trains_both_embeddings_and_predicts_single_tokens():
    model = LoopedLM(ModelConfig.tiny(pairs=True, tied=False), seed=0)
    pairs, targets = torch.randint(257**2, (2, 6)), torch.randint(257, (2, 6))
    assert model(pairs).shape == (2, 6, 257)
    model.loss(pairs, targets).loss.backward()
    touched = model.embedding.weight.grad.abs().sum(1) > 0
    assert set(touched.nonzero().flatten().tolist()) == {*(pairs // 257).flatten().tolist()} | {
        257 + second for second in (pairs % 257).flatten().tolist()
    }
    named = {group["name"]: group["param_names"] for group in parameter_groups(model, lr=1e-3)}
    assert named["embedding"] == ["embedding.weight"]
    with pytest.raises(ValueError, match="out of range"):
        model(torch.tensor([[257**2]]))


def test_pairs_need_a_head_of_their_own_and_data_that_has_them():
    with pytest.raises(ValueError, match=r"pairs of tokens have two embeddings .*; set model.tied to false"):
        LoopedLM(ModelConfig.tiny(pairs=True, tied=True))
    with pytest.raises(ValueError, match=r"model.pairs .True. and data.options.pairs must agree: .* set both or none"):
        check_model(config(model={"pairs": True, "tied": False}))


def test_a_model_of_pairs_writes_no_text():
    model = LoopedLM(ModelConfig.tiny(pairs=True, tied=False), seed=0)
    with pytest.raises(ValueError, match=r"reads two tokens at a time and writes one; it cannot continue a text"):
        lo.generate(model, Tokenizer.bytes(), "a0")
