"""Checkpoints: data and nothing else, digests that notice every flipped bit, old ones still read, none that misfits."""

import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support import config, losses
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from xxhash import xxh3_128

import looptim as lo
from looptim.model import LoopedLM
from looptim.rundir import DamagedError, RunDir
from looptim.training import checkpoint
from looptim.training.distributed import World
from looptim.training.optim import MuonAdamW, parameter_groups
from looptim.training.storage import DTYPES, write_tensors

ALONE = World(0, 1, torch.device("cpu"))


def build(**changes):
    model = LoopedLM(config(model=changes).model, seed=1)
    return model, MuonAdamW(parameter_groups(model, lr=1e-3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return lo.train(config(), tmp_path_factory.mktemp("runs") / "run", progress=False)


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def old(trained, tmp_path):
    """The same run with its last checkpoint as looptim wrote it first: by DCP, with a pickle as its index."""
    run = shutil.copytree(trained, tmp_path / "old")
    newest = RunDir(run).latest()
    model, optimizer = build()
    checkpoint.load(newest, model, optimizer, ALONE)
    record = (newest / "checkpoint.json").read_text()
    shutil.rmtree(newest)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(newest), no_dist=True)
    (newest / "checkpoint.json").write_text(record)
    return run


def test_a_checkpoint_is_safetensors_json_and_digests(trained):
    newest = RunDir(trained).latest()
    names = {"XXH128SUMS", "checkpoint.json", "index.json", "model-00000.safetensors", "optimizer-00000.safetensors"}
    assert {file.name for file in newest.iterdir()} == names
    stored, model = load_file(newest / "model-00000.safetensors"), lo.load(trained)[0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(stored.pop(f"model.{name}"), tensor)
    assert not stored
    lines = [f"{xxh3_128((newest / name).read_bytes()).hexdigest()}  {name}\n" for name in sorted(names)[1:]]
    assert (newest / "XXH128SUMS").read_text() == "".join(lines)
    if shutil.which("xxh128sum"):
        subprocess.run(["xxh128sum", "--check", "--strict", "XXH128SUMS"], cwd=newest, check=True, capture_output=True)


def test_every_dtype_is_written_as_safetensors_reads_it(tmp_path):
    tensors = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors["none"], tensors["scalar"] = torch.zeros(0, 3), torch.tensor(7.0)
    parts = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    write_tensors(tmp_path / "all.safetensors", parts, tensors.values())
    stored = load_file(tmp_path / "all.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == tensors[name].dtype and tensor.tolist() == tensors[name].tolist()


def test_a_flip_of_any_bit_of_any_file_is_noticed(copy):
    newest, chance = RunDir(copy).latest(), random.Random(0)
    model, optimizer = build()
    for file in sorted(newest.iterdir()):
        whole = file.read_bytes()
        for _ in range(60):
            place, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
            file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(DamagedError, match="step_000012 is damaged"):
                checkpoint.load(newest, model, optimizer, ALONE)
        file.write_bytes(whole)
    checkpoint.load(newest, model, optimizer, ALONE)


@pytest.mark.long
@pytest.mark.parametrize("name", ["XXH128SUMS", "index.json", "model-00000.safetensors"])
def test_the_checkpoint_before_a_damaged_one_is_used_after_saying_so(trained, copy, capsys, name):
    file = RunDir(copy).latest() / name
    file.write_bytes(file.read_bytes()[:-5])
    model, _ = lo.load(copy)
    said = capsys.readouterr().err
    assert (
        "step_000012 is damaged" in said and said.endswith("; step_000009 is used instead\n") and "\n" not in said[:-1]
    )
    before, _ = build()
    checkpoint.load(RunDir(trained).checkpoint(9), before, None, ALONE)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    )
    lo.train(config(), copy, resume=True, progress=False)
    assert losses(copy) == losses(trained)
    capsys.readouterr()
    lo.load(copy)
    assert not capsys.readouterr().err


def test_a_checkpoint_in_the_place_of_another_is_noticed(copy):
    shutil.rmtree(RunDir(copy).checkpoint(12))
    shutil.copytree(RunDir(copy).checkpoint(9), RunDir(copy).checkpoint(12))
    model, _ = build()
    with pytest.raises(DamagedError, match=r"step_000012 is damaged \(checkpoint.json: it was written after step 9\)"):
        checkpoint.load(RunDir(copy).checkpoint(12), model, None, ALONE)


def test_where_all_are_damaged_it_is_one_sentence(copy):
    for path in RunDir(copy).checkpoints():
        (path / "optimizer-00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"step_000009 is damaged \(.*\); restore it from a copy, or delete it") as e:
        lo.train(config(), copy, resume=True, progress=False)
    assert "\n" not in str(e.value)
    # Only what is asked for is read.
    lo.load(copy)


@pytest.mark.parametrize(("layout", "which"), [("1-1x2-2", "has no"), ("1-1x2", "also has")])
def test_a_model_of_other_layers_does_not_fit(copy, layout, which):
    model, optimizer = build(layout=layout)
    with pytest.raises(ValueError, match=rf"does not fit the model of this config: it {which} \S+"):
        checkpoint.load(RunDir(copy).latest(), model, optimizer, ALONE)


def test_an_index_that_leads_elsewhere_is_not_followed(copy):
    newest = RunDir(copy).latest()
    index = json.loads((newest / "index.json").read_text())
    for tensor in index.values():
        tensor["chunks"][0]["file"] = "../step_000009/" + tensor["chunks"][0]["file"]
    (newest / "index.json").write_text(json.dumps(index))
    digest_by_sha256(newest)
    with pytest.raises(DamagedError, match=r"SHA256SUMS has no '\.\./step_000009"):
        checkpoint.load(newest, *build(), ALONE)


def digest_by_sha256(folder):
    """Digests as looptim wrote them until it was found that they made loading slow."""
    (folder / "XXH128SUMS").unlink()
    files = sorted(folder.iterdir())
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def test_digests_of_before_are_still_checked(copy):
    newest = RunDir(copy).latest()
    digest_by_sha256(newest)
    model, optimizer = build()
    checkpoint.load(newest, model, optimizer, ALONE)
    file = newest / "optimizer-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedError, match="is not as it was written"):
        checkpoint.load(newest, model, optimizer, ALONE)


@pytest.mark.long
def test_a_checkpoint_of_before_is_loaded_and_continued(trained, old):
    assert all(
        torch.equal(a, b)
        for a, b in zip(lo.load(old)[0].state_dict().values(), lo.load(trained)[0].state_dict().values(), strict=True)
    )
    more = {"steps": 15, "valid_every": 15}
    longer = shutil.copytree(trained, old.with_name("new"))
    for run in (old, longer):
        lo.train(config(**more), run, resume=True, force=True, progress=False)
    assert losses(old) == losses(longer)


class Attack:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def test_a_pickle_in_a_checkpoint_is_not_run(old, tmp_path):
    newest, trace = RunDir(old).latest(), tmp_path / "trace"
    for call, *arguments in (
        (os.mkdir, str(trace)),
        (eval, f"__import__('os').mkdir({str(trace)!r})"),
        (torch.load, str(newest / ".metadata")),
    ):
        (newest / ".metadata").write_bytes(pickle.dumps(Attack(call, *arguments)))
        with pytest.raises(DamagedError, match="which no checkpoint needs"):
            checkpoint.load(newest, *build(), ALONE)
    assert not trace.exists()


def test_a_pickle_behind_the_index_of_an_old_checkpoint_is_not_run(old, tmp_path):
    newest, trace = RunDir(old).latest(), tmp_path / "trace"
    found = pickle.loads((newest / ".metadata").read_bytes())
    torch.save(Attack(os.mkdir, str(trace)), newest / "attack")
    size = (newest / "attack").stat().st_size
    for index, place in found.storage_data.items():
        if index.fqn == "model.norm.gain":
            place.relative_path, place.offset, place.length = "attack", 0, size
    (newest / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(DamagedError):
        checkpoint.load(newest, *build(), ALONE)
    # As bytes, DCP would unpickle it without any list.
    found.state_dict_metadata["model.norm.gain"] = metadata.BytesStorageMetadata()
    (newest / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"it has no model\.norm\.gain"):
        checkpoint.load(newest, *build(), ALONE)
    assert not trace.exists()
