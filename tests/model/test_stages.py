"""A forward in stages against the whole forward, and calls that are joined."""

import pytest
import torch

from looptim.config import ModelConfig
from looptim.loop.depth import Fixed
from looptim.model import Layout, LoopedLM
from looptim.model.stages import Stages, join


def build(preset, **options):
    config = ModelConfig.tiny(layout="1-2x4-1", loop={"preset": preset, "options": options})
    return LoopedLM(config, seed=0).eval()


@torch.no_grad()
@pytest.mark.parametrize("preset", ["operloop", "operloop_nesterov"])
def test_the_stages_are_the_forward(preset):
    model, tokens = build(preset, shared=True), torch.randint(257, (2, 6))
    h, positions = model.embed(tokens), torch.arange(6)
    stages = Stages(model, Layout.of(model.config), h, positions)
    begun = stages.begin(h, 3)
    assert torch.equal(model.head(stages.finish(stages.go_on(begun))), model(tokens))
    assert torch.equal(model.head(stages.finish(begun)), model(tokens, depth=Fixed(3)))
    parts = [_select(begun, slice(0, 2)), _select(begun, slice(2, 6))]
    assert torch.equal(stages.finish(stages.go_on(join(parts))), stages.finish(stages.go_on(begun)))


def _select(begun, places):
    def cut(leaf):
        return leaf[:, places] if isinstance(leaf, torch.Tensor) else leaf

    state = torch.utils._pytree.tree_map(cut, begun.state)
    return begun._replace(e=cut(begun.e), state=state)


def test_a_model_without_one_loop_has_no_stages():
    model = LoopedLM(ModelConfig.tiny(layout="1x2-1x2"), seed=0)
    with pytest.raises(ValueError, match="the layout has 2 looped segments; only a model with one has these stages"):
        Stages(model, Layout.of(model.config), torch.zeros(1, 1, 32), torch.arange(1))
