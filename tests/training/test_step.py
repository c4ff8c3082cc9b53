"""Updates and validations of packed documents: the losses and gradients of documents run one by one."""

import json
import random

import pytest
import torch
from support import config, losses

import looptim as lo
from looptim.data import open_data
from looptim.model.count import training_flops
from looptim.model.lm import LoopedLM
from looptim.rundir import RunDir
from looptim.training.distributed import World
from looptim.training.metrics import RunLog
from looptim.training.optim import MuonAdamW, parameter_groups
from looptim.training.step import TrainingState, update, validate


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A corpus of documents from one byte to more than a window."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("corpus")
    texts = ["".join(rng.choices("abcd ", k=rng.choice([1, 3, 9, 20, 60]))) for _ in range(200)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"source": str(folder / "text.jsonl"), "options": {}, "tokenizer": "bytes", "cache": str(folder / "cache")}


def masked(source, model=None, **train):
    data = {**source, "valid_fraction": 0.3, "mask_attention": True}
    return config(model={"aux_coefficient": 0.0, "init_std": 0.3, **(model or {})}, data=data, **train)


def open_run(recipe, folder):
    """A training that has not begun, in float64."""
    data = open_data(recipe.data, vocab_size=257, seq_len=recipe.train.seq_len, progress=False)
    model = LoopedLM(recipe.model, seed=0).double()
    optimizer = MuonAdamW(parameter_groups(model, lr=1e-3, weight_decay=0.1))
    return TrainingState(recipe, RunDir(folder), World(0, 1, torch.device("cpu")), data, model, optimizer)


def one_by_one(run, split, step):
    """The summed losses of a batch's documents, each run alone, and the number of its targets."""
    total, counted = 0.0, 0
    batch = run.data.batch(split, seed=0, step=step, batch_size=4)
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        after = ((tokens == run.data.tokenizer.eos).nonzero().flatten() + 1).tolist()
        pieces = zip(tokens.tensor_split(after), targets.tensor_split(after), strict=True)
        for x, y in ((x.unsqueeze(0), y.unsqueeze(0)) for x, y in pieces if len(x)):
            targeted = int((y != -100).sum())
            if targeted:
                total = total + targeted * run.model.loss(x, y).cross_entropy
            counted += targeted
    return total, counted


@pytest.mark.long
@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("mask_boundaries", [False, True])
@pytest.mark.parametrize("preset", ["vanilla", "operloop", "hyperloop"])
def test_a_batch_has_the_loss_of_its_documents_one_by_one(source, tmp_path, preset, mask_boundaries, micro_batch):
    # One layer of full attention and three in windows of eight.
    model = {"loop": {"preset": preset}, "pattern": "SSF"}
    recipe = masked({**source, "mask_boundaries": mask_boundaries}, model, micro_batch=micro_batch)
    run = open_run(recipe, tmp_path)
    total, counted = one_by_one(run, "train", 5)
    gradients = torch.autograd.grad(total / counted, list(run.model.parameters()))
    held_out = [one_by_one(run, "valid", index) for index in range(2)]
    valid_loss = validate(run)["valid_loss"]
    assert valid_loss == pytest.approx(sum(t.item() for t, _ in held_out) / sum(n for _, n in held_out), rel=1e-10)
    values, _ = update(run, 5).read()
    # The logged loss is summed in fp32.
    assert values["loss"] == pytest.approx((total / counted).item(), rel=1e-6)
    assert values["grad_norm"] == pytest.approx(sum(g.square().sum() for g in gradients).sqrt().item(), rel=1e-9)


def test_without_the_mask_documents_do_see_each_other(source, tmp_path, monkeypatch):
    given, loss_of = [], LoopedLM.loss
    monkeypatch.setattr(LoopedLM, "loss", lambda *a, **b: given.append(b["documents"]) or loss_of(*a, **b))
    found = []
    for mask in (False, True):
        recipe = masked(source)
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"mask_attention": mask})})
        run = open_run(recipe, tmp_path)
        found.append([validate(run)["valid_loss"], update(run, 0).read()[0]["loss"]])
        assert {part is not None for part in given} == {mask}
        given.clear()
    assert all(abs(a - b) > 1e-3 for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("mask", [False, True])
def test_mfu_claims_only_the_scores_that_documents_leave(source, tmp_path, monkeypatch, mask):
    claimed, log = set(), RunLog.update
    monkeypatch.setattr(RunLog, "update", lambda *a, **told: claimed.add(told["flops_per_token"]) or log(*a, **told))
    recipe = masked(source, steps=3, valid_every=3)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"mask_attention": mask})})
    lo.train(recipe, tmp_path / "run", progress=False)
    batch = open_run(recipe, tmp_path).data.batch("train", seed=0, step=0, batch_size=4)
    inside, across = training_flops(recipe, documents=batch.document_lengths()), training_flops(recipe)
    assert inside < across
    assert claimed == {inside if mask else across}


@pytest.mark.slow
def test_a_compiled_run_keeps_documents_apart_too(source, tmp_path):
    torch._dynamo.reset()
    runs = [
        lo.train(masked(source, steps=4, valid_every=4, compile=compiled), tmp_path / str(compiled), progress=False)
        for compiled in (False, True)
    ]
    plain, compiled = map(losses, runs)
    assert list(compiled.values()) == pytest.approx(list(plain.values()), rel=1e-3)
