"""A single token runs its blocks another way: the same numbers, and weights that only moved."""

import copy

import pytest
import torch

from looptim import LoopedLM, ModelConfig
from looptim.model import Attention, Block, MoE, SwiGLU, rope_table
from looptim.model.alone import is_alone, joined, knows, lay_together, run_block
from looptim.model.rope import rotation_matrix

WIDTH, HEAD = 32, 16


def make_block(*, moe=True, qk_norm=True, visits=1, dtype=torch.float64):
    feedforward = SwiGLU(WIDTH, 48)
    if moe:
        sizes = {"experts": 6, "top_k": 2, "expert_hidden": 8, "shared_hidden": 24}
        feedforward = MoE(WIDTH, **sizes, biases=visits, routers=visits)
        torch.nn.init.normal_(feedforward.bias)
    block = Block(
        Attention(WIDTH, heads=4, kv_heads=2, head_dim=HEAD, qk_norm=qk_norm, norm_eps=1e-2), feedforward, width=WIDTH
    )
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block.to(dtype)


def slot(length=5):
    """A slot with keys of tokens before."""
    before = torch.randn(2, 1, 2, length, HEAD, dtype=torch.float64)

    def attend(q, k, v):
        k, v = torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return attend


@torch.no_grad()
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("options", [{"moe": False}, {}, {"qk_norm": False}, {"visits": 3}])
def test_gives_what_the_block_gives(options, together):
    block, attend = make_block(**options), slot()
    if together:
        lay_together(block)
        assert joined(block.attention.q.weight, block.attention.k.weight, block.attention.v.weight) is not None
    x, rope = torch.randn(1, 1, WIDTH, dtype=torch.float64), rope_table(torch.tensor([7]), 8, 1e4, dtype=torch.float64)
    for visit in range(4):
        wanted, _ = block(x, attend, rope, visit, False)
        y = run_block(block, x, attend, rotation_matrix(*rope, HEAD), visit)
        torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    assert knows(block, torch.float64)


def test_parts_that_were_changed_are_not_known():
    block = make_block(dtype=torch.float32)
    assert not knows(block, torch.float64)
    hook = block.attention.q.register_forward_hook(lambda module, args, out: 2 * out)
    assert not knows(block, torch.float32)
    hook.remove()
    assert knows(block, torch.float32)
    block.feedforward.router.forward = lambda *args: None
    assert not knows(block, torch.float32)
    del block.feedforward.router.forward
    block.attention.o = torch.nn.Sequential(block.attention.o)
    assert not knows(block, torch.float32)


def test_only_a_single_token_without_a_gradient_is_alone():
    one = torch.zeros(1, 1, 8)
    assert not is_alone(one)
    with torch.no_grad():
        assert is_alone(one) and not is_alone(torch.zeros(1, 2, 8)) and not is_alone(one.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_alone(one)


def test_weights_that_moved_keep_their_values_train_and_load():
    model = LoopedLM(ModelConfig.tiny(layout="1-1x3-1", loop={"preset": "operloop"}), seed=0)
    before = copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        lay_together(model)
    layer = model.blocks[0].attention
    assert joined(layer.q.weight, layer.k.weight, layer.v.weight) is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    tokens = torch.zeros(1, 4, dtype=torch.long)
    model.loss(tokens, tokens).loss.backward()
    with torch.no_grad():
        layer.q.weight += layer.q.weight.grad
    assert torch.equal(joined(layer.q.weight, layer.k.weight)[: len(layer.q.weight)], layer.q.weight)
    assert not torch.equal(layer.q.weight, before["blocks.0.attention.q.weight"])
    model.load_state_dict(before)
    assert torch.equal(layer.q.weight, before["blocks.0.attention.q.weight"])
    # A copy has weights of its own again.
    assert joined(*(getattr(copy.deepcopy(layer), name).weight for name in "qkv")) is None


def test_neighbors_of_another_owner_are_not_joined():
    whole = torch.zeros(8, 4)
    other = torch.from_numpy(whole.numpy()[4:])
    mine = torch.from_numpy(whole.numpy()[:4])
    assert joined(mine, other) is None
    assert joined(*whole.split(4)).shape == (8, 4)
    assert joined(whole[:4].T, whole[4:]) is None
