"""No update waits for the device but one that is logged, and one that is not finite changes nothing."""

import dataclasses

import pytest
import torch
from support import config
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

import looptim as lo
from looptim.config import ParallelConfig
from looptim.data import Batch, Dataset, open_data
from looptim.model import Experts, LoopedLM
from looptim.rundir import RunDir
from looptim.training import step as steps
from looptim.training.distributed import World
from looptim.training.mesh import build, open_mesh
from looptim.training.optim import MuonAdamW, parameter_groups
from looptim.training.plan import fake_processes
from looptim.training.step import Skips, TrainingState, update

READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique2", "equal"}
"""Operations whose result the host must know."""


class Unread(TorchDispatchMode):
    """Fails where the host reads what is on the device, which `.item()`, `.tolist()`, `if tensor` and the like do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Depths are drawn on the host, from real numbers.
        if any(isinstance(arg, FakeTensor) for arg in args):
            assert func.overloadpacket.__name__ not in READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


class Zeros(Dataset):
    """Batches of nothing."""

    def num_tokens(self, split):
        return None

    num_windows = windows = num_tokens

    def batch(self, split, *, seed, step, batch_size, rows=None):
        tokens = torch.zeros(len(range(batch_size)[rows]), 32, dtype=torch.long)
        return Batch(tokens, tokens, tokens)


RECIPES = {
    "operloop": config(batch_size=8, micro_batch=2),
    "per visit, recomputed": config(
        model={"balance": "per_visit", "router": "per_visit"}, batch_size=4, activation_checkpointing=True
    ),
    "huginn's depths": config(
        model={"loop": {"preset": "huginn", "options": {"start": "prelude"}}},
        loops={"scheme": "huginn", "mean": 3.0, "grad_loops": 2},
    ),
    "read-outs, bf16": config(loops={"readouts": 1}, dtype="bf16"),
    "documents": config(data={"mask_boundaries": True}),
}


def without_values(recipe, world, mesh=None):
    """A training whose tensors have no values, so that whoever reads one fails, as a GPU would have to be waited for.

    Without CUDA in torch they cannot be on a GPU: autograd and indexing ask for one.
    """
    model = build(recipe, world, mesh)
    # On a GPU tokens are not checked.
    model.check_vocabulary = lambda tokens: None
    model.checkpointing = recipe.train.activation_checkpointing
    optimizer = MuonAdamW(parameter_groups(model, lr=1e-3, weight_decay=0.1))
    return TrainingState(recipe, RunDir("none"), world, Zeros(), model, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_an_update_reads_nothing(name, monkeypatch):
    recipe, sample = RECIPES[name], steps.sample_loops

    def sample_on_the_host(*arguments):
        with unset_fake_temporarily():
            return sample(*arguments)

    monkeypatch.setattr(steps, "sample_loops", sample_on_the_host)
    with FakeTensorMode(allow_non_fake_inputs=True):
        run = without_values(recipe, World(0, 1, torch.device("cpu")))
        skips = Skips(run.world.device)
        with Unread():
            for step in range(2):
                done = update(run, step)
                skips.count(done)
        with pytest.raises((AssertionError, DataDependentOutputException)):
            skips.read(done, last=False)


@pytest.mark.long
def test_the_only_read_of_expert_parallelism_is_of_split_sizes():
    recipe = config(batch_size=4, micro_batch=1).model_copy(update={"parallel": ParallelConfig(expert=2)})
    reads = []
    with fake_processes(2) as world:
        mesh = open_mesh(recipe.parallel, world)
        with FakeTensorMode():
            run = without_values(recipe, world, mesh)
            for module in run.model.modules():
                if isinstance(module, Experts):

                    def sizes(sent, got):
                        reads.append(sent)
                        return [32, 32], [32, 32]

                    module.exchange = dataclasses.replace(module.exchange, read=sizes)
            with Unread():
                update(run, 0)
    # Two micro-batches of two visits of a looped layer and one of a plain one.
    assert len(reads) == 2 * 3


def real_run(folder, **train):
    recipe = config(batch_size=4, **train)
    data = open_data(recipe.data, vocab_size=257, seq_len=32, progress=False)
    model = LoopedLM(recipe.model, seed=0)
    optimizer = MuonAdamW(parameter_groups(model, lr=1e-3, weight_decay=0.1))
    return TrainingState(recipe, RunDir(folder), World(0, 1, torch.device("cpu")), data, model, optimizer)


def everything(run):
    states = [t.clone() for state in run.optimizer.state.values() for t in state.values()]
    return [tensor.clone() for tensor in run.model.state_dict().values()] + states


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_an_update_that_is_not_finite_changes_nothing(broken, tmp_path, monkeypatch):
    run = real_run(tmp_path)
    update(run, 0)
    before, accumulate = everything(run), steps.accumulate

    def breaks(run, batch, step):
        loss, loads = accumulate(run, batch, step)
        if broken == "gradient":
            next(p for p in run.model.parameters() if p.ndim == 2).grad[0, 0] = float("inf")
        return (loss * float("nan") if broken == "loss" else loss), loads

    with monkeypatch.context() as patch:
        patch.setattr(steps, "accumulate", breaks)
        skips = Skips(torch.device("cpu"))
        for step in (1, 2):
            done = update(run, step)
            skips.count(done)
    for a, b in zip(before, everything(run), strict=True):
        assert torch.equal(a, b)
    assert skips.read(done, last=False)["skipped"] == 2
    # The next one is as if they had not been.
    after = update(run, 3)
    skips.count(after)
    assert "skipped" not in skips.read(after, last=True)
    fresh = real_run(tmp_path)
    for step in (0, 3):
        update(fresh, step)
    for a, b in zip(everything(fresh), everything(run), strict=True):
        assert torch.equal(a, b)


def test_a_run_with_a_skipped_update_goes_on_and_says_so(tmp_path, monkeypatch, capfd):
    accumulate = steps.accumulate

    def breaks_once(run, batch, step):
        loss, loads = accumulate(run, batch, step)
        return (loss * float("nan") if step == 1 else loss), loads

    monkeypatch.setattr(steps, "accumulate", breaks_once)
    run = lo.train(config(steps=4, log_every=2, valid_every=4), tmp_path / "run")
    lines = RunDir(run).metrics.read()
    assert [(line["step"], line.get("loss", 0) is None, line.get("skipped")) for line in lines if "loss" in line] == [
        (2, True, 1),
        (4, False, None),
    ]
    assert "step 2: 1 updates were not finite and were skipped" in capfd.readouterr().err
