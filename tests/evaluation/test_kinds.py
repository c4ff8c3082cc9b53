"""Depth by kind: of text by what a token looks like, of chained assignments by the hops that are needed."""

import pytest
import torch

from looptim.data import open_data
from looptim.evaluation.kinds import depth_by_kind
from looptim.recipe import load_config


@pytest.mark.parametrize("recipe", ["deref", "deref-tokens"])
def test_tokens_of_chained_assignments_are_grouped_by_hops(recipe):
    config = load_config(recipe, set=["data.options.hops=4", "data.options.chains=3"])
    data = open_data(config.data, vocab_size=257, seq_len=config.train.seq_len)
    batch = data.batch("valid", seed=0, step=0, batch_size=5)
    # Every token goes as deep as it must, and a token without a target much deeper.
    depth = data.difficulty_of(batch.tokens)
    depth = torch.where(depth < 0, 99, depth)
    found = depth_by_kind([(batch.tokens, batch.targets)], [depth], data.tokenizer, data)
    assert found == {f"{hops} hops": {"loops": hops, "tokens": 15} for hops in range(4)}
    assert (
        sorted(data.graded.difficulty_of(data.graded.problem("valid", 0, 0).text)[1::2])
        == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    )
