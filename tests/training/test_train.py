"""Training: it learns, resumes bit for bit after any kill, and refuses what cannot work with one sentence."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import config, losses
from xxhash import xxh3_128

import looptim as lo
from looptim.model import lm
from looptim.model.lm import LoopedLM
from looptim.rundir import RunDir, difference, read_record
from looptim.training import storage
from looptim.training import train as training
from looptim.training.distributed import World
from looptim.training.metrics import environment
from looptim.training.optim import MuonAdamW, learning_rate
from looptim.training.step import _mix, sample_loops

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that was never interrupted."""
    return lo.train(config(), tmp_path_factory.mktemp("runs") / "straight", progress=False)


def test_a_run_leaves_what_the_design_says(straight):
    assert sorted(losses(straight)) == list(range(1, 13))
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "moe_load"} <= lines[1].keys()
    # What the loops do is known before the first update, too.
    valid = lines[0]
    assert valid["step"] == 0
    assert len(valid["step_size"]) == len(valid["decay"]) == 2
    assert len(valid["state_norm"]) == 3
    assert lo.load_config(straight / "config.toml") == config()
    record = json.loads((straight / "env.json").read_text())
    assert {"looptim", "torch", "data", "groups"} <= record.keys()
    assert [path.name for path in sorted((straight / "checkpoints").iterdir())] == ["step_000009", "step_000012"]


def test_the_same_run_twice_has_the_same_losses(straight, tmp_path):
    assert losses(lo.train(config(), tmp_path / "again", progress=False)) == losses(straight)


def test_the_loss_falls(tmp_path):
    run = lo.train(config(steps=60, checkpoint_every=60, valid_every=60), tmp_path / "run", progress=False)
    values = list(losses(run).values())
    assert sum(values[-5:]) < 0.7 * sum(values[:5])


def test_the_optimizer_gets_the_schedule_and_clipped_gradients(tmp_path, monkeypatch):
    seen, step_of = [], MuonAdamW.step

    def step(self, **options):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        seen.append(({group["lr"] for group in self.param_groups}, torch.nn.utils.get_total_norm(gradients).item()))
        return step_of(self, **options)

    monkeypatch.setattr(MuonAdamW, "step", step)
    lo.train(config(steps=4, valid_every=4, optim={"clip": 1e-3}), tmp_path / "run", progress=False)
    wanted = [learning_rate(s, peak=3e-3, minimum=3e-4, warmup=2, total=4) for s in range(4)]
    assert [lrs for lrs, _ in seen] == [{lr} for lr in wanted]
    assert [norm for _, norm in seen] == pytest.approx([1e-3] * 4, rel=1e-3)
    assert list(losses(tmp_path / "run", "lr").values()) == wanted
    assert len(set(wanted)) == 4


def test_a_run_that_is_done_keeps_the_record_of_who_made_it(straight, tmp_path):
    run = shutil.copytree(straight, tmp_path / "run")
    (run / "env.json").write_text('{"platform": "elsewhere"}')
    lo.train(config(), run, resume=True, progress=False)
    assert (run / "env.json").read_text() == '{"platform": "elsewhere"}'
    assert losses(run) == losses(straight)


def test_load_gives_the_trained_model(straight):
    model, tokenizer = lo.load(straight)
    assert not model.training
    text = "12+34="
    assert tokenizer.decode(tokenizer.encode(text)) == text
    record = read_record(RunDir(straight).latest())
    assert record["step"] == 12
    assert record["config"]["train"]["steps"] == 12


SLOWLY = """
import sys, time
import torch.distributed.checkpoint as dcp
import looptim as lo
from looptim.training import train as module
save = dcp.save
update = module.update
# Slow enough that a kill falls inside the run, and often inside the write of a checkpoint.
dcp.save = lambda *a, **k: (save(*a, **k), time.sleep(0.2))
module.update = lambda *a: (time.sleep(0.05), update(*a))[1]
lo.train(lo.load_config(sys.argv[1]), sys.argv[2], resume=True, progress=False)
"""


def test_killed_at_random_moments_it_ends_with_the_same_losses_bit_for_bit(straight, tmp_path):
    run, recipe, chance = tmp_path / "killed", tmp_path / "recipe.toml", random.Random(0)
    recipe.write_text(config().to_toml())
    metrics = run / "metrics.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    kills = 0
    for attempt in range(5):
        process = subprocess.Popen([sys.executable, "-c", SLOWLY, str(recipe), str(run)], env=environment)
        before = metrics.stat().st_mtime_ns if metrics.is_file() else 0
        # Until it logs, then a random while; the last attempt is left alone.
        while (
            attempt < 4 and process.poll() is None and (not metrics.is_file() or metrics.stat().st_mtime_ns == before)
        ):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 1))
        if attempt < 4 and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait(timeout=120)
    assert process.returncode == 0
    assert kills >= 2
    assert losses(run) == losses(straight)
    assert not list((run / "checkpoints").glob(".*partial"))


def test_interrupted_inside_a_checkpoints_write_the_one_before_is_used(straight, tmp_path, monkeypatch):
    run = tmp_path / "run"
    rename = Path.rename

    def dies(self, target):
        if self.name == ".step_000006.partial":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        lo.train(config(), run, progress=False)
    monkeypatch.undo()
    assert RunDir(run).latest().name == "step_000003"
    lo.train(config(), run, resume=True, progress=False)
    assert losses(run) == losses(straight)


@pytest.mark.parametrize(
    ("numbers", "last"),
    [
        ([signal.SIGINT], 4),
        # A scheduler's SIGTERM to a study and its worker, to which the study passes it on.
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGINT], 4),
        ([signal.SIGINT, signal.SIGINT], 3),
    ],
)
def test_ctrl_c_leaves_a_checkpoint_to_resume_from(straight, tmp_path, monkeypatch, numbers, last):
    update = training.update

    def stops(run, step):
        if step == 3:
            for number in numbers:
                os.kill(os.getpid(), number)
        return update(run, step)

    monkeypatch.setattr(training, "update", stops)
    with pytest.raises(KeyboardInterrupt):
        lo.train(config(), tmp_path / "run", progress=False)
    monkeypatch.undo()
    assert RunDir(tmp_path / "run").latest().name == f"step_{last:06}"
    lo.train(config(), tmp_path / "run", resume=True, progress=False)
    assert losses(tmp_path / "run") == losses(straight)


@pytest.mark.parametrize("loops", [{}, {"scheme": "huginn", "mean": 3.0}])
def test_what_is_random_in_the_forward_resumes_bit_for_bit(tmp_path, loops):
    noisy = {"model": {"loop": {"preset": "huginn"}}, "loops": loops, "valid_every": 6}
    whole = lo.train(config(steps=6, **noisy), tmp_path / "whole", progress=False)
    (tmp_path / "cut" / "checkpoints").mkdir(parents=True)
    shutil.copy(whole / "config.toml", tmp_path / "cut")
    shutil.copytree(whole / "checkpoints/step_000003", tmp_path / "cut/checkpoints/step_000003")
    torch.rand(17)
    cut = losses(lo.train(config(steps=6, **noisy), tmp_path / "cut", resume=True, progress=False))
    assert cut == {step: loss for step, loss in losses(whole).items() if step > 3}


def test_a_full_disk_is_one_sentence_and_no_broken_checkpoint(tmp_path, monkeypatch):

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    lo.train(config(steps=3, valid_every=3), tmp_path / "run", progress=False)
    monkeypatch.setattr(storage, "write_tensors", full)
    with pytest.raises(ValueError, match=r"could not write the checkpoint of step 6 .*No space left on device"):
        lo.train(config(), tmp_path / "run", resume=True, force=True, progress=False)
    assert RunDir(tmp_path / "run").latest().name == "step_000003"
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_give_the_same_losses(straight, tmp_path, monkeypatch, size):
    rows, loss_of = [], LoopedLM.loss
    monkeypatch.setattr(LoopedLM, "loss", lambda model, x, *a, **b: rows.append(len(x)) or loss_of(model, x, *a, **b))
    run = lo.train(config(micro_batch=size), tmp_path / "run", progress=False)
    # Validation keeps to them too.
    assert set(rows) == {1, size}
    for key in ("loss", "valid_loss"):
        for step, loss in losses(straight, key).items():
            assert losses(run, key)[step] == pytest.approx(loss, rel=2e-4)


def test_the_auxiliary_loss_weighs_every_sequence_alike(tmp_path):
    heavy = {"aux_coefficient": 10.0}
    whole = lo.train(config(model=heavy), tmp_path / "whole", progress=False)
    uneven = lo.train(config(model=heavy, micro_batch=3), tmp_path / "uneven", progress=False)
    for step, loss in losses(whole).items():
        assert losses(uneven)[step] == pytest.approx(loss, rel=2e-4)


@pytest.mark.parametrize(
    ("change", "close"), [({"activation_checkpointing": True}, 1e-5), ({"dtype": "bf16"}, 0.05), ({"keep_every": 3}, 0)]
)
def test_options_of_a_run(straight, tmp_path, monkeypatch, change, close):
    regions, autocast, loss_of = [], set(), LoopedLM.loss
    again = lm.checkpoint

    def loss(*arguments, **options):
        autocast.add(torch.is_autocast_enabled("cpu"))
        return loss_of(*arguments, **options)

    monkeypatch.setattr(lm, "checkpoint", lambda *a, **b: regions.append(a[0]) or again(*a, **b))
    monkeypatch.setattr(LoopedLM, "loss", loss)
    run = lo.train(config(**change), tmp_path / "run", progress=False)
    assert losses(run)[12] == pytest.approx(losses(straight)[12], rel=close, abs=0)
    # Every unrolled layer of every update is a region of its own.
    assert len(regions) == (12 * 4 if "activation_checkpointing" in change else 0)
    assert autocast == {"dtype" in change}
    if "keep_every" in change:
        assert len(list((run / "checkpoints").iterdir())) == 4


def test_a_compiled_run_has_its_blocks_compiled(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(LoopedLM, "compile_blocks", lambda model: compiled.append(model))
    lo.train(config(steps=3, valid_every=3, compile=True), tmp_path / "run", progress=False)
    assert len(compiled) == 1


def test_every_visit_may_have_a_bias_and_a_router_of_its_own(tmp_path):
    run = lo.train(config(model={"balance": "per_visit", "router": "per_visit"}), tmp_path / "run", progress=False)
    feedforward = lo.load(run)[0].blocks[1].feedforward
    bias, routers = feedforward.bias, feedforward.router.weight
    assert routers.shape[0] == 2 and not torch.equal(routers[0], routers[1])
    assert bias.shape[0] == 2 and bias.abs().max() <= 12 * 5e-3 + 1e-7
    assert bias.any(1).all() and not torch.equal(bias[0], bias[1])


@pytest.mark.parametrize("scheme", ["huginn", "parcae"])
def test_loop_counts_can_be_sampled_and_backpropagation_truncated(tmp_path, scheme):
    # Not from noise, which every micro-batch would draw anew; with weights so large that the depth matters.
    shared = {"loop": {"preset": "huginn", "options": {"start": "prelude"}}, "init_std": 0.3}
    sampled = config(model=shared, loops={"scheme": scheme, "mean": 4.0, "grad_loops": 2}, steps=4, valid_every=4)
    run = lo.train(sampled, tmp_path / "run", progress=False)
    pieces = config(
        model=shared, loops={"scheme": scheme, "mean": 4.0, "grad_loops": 2}, steps=4, valid_every=4, micro_batch=1
    )
    in_pieces = losses(lo.train(pieces, tmp_path / "pieces", progress=False))
    for step, loss in losses(run).items():
        assert in_pieces[step] == pytest.approx(loss, rel=1e-3)
    draws = [sample_loops(sampled, step, slice(0, 4)) for step in range(300)]
    drawn = [torch.as_tensor(d.steps if scheme == "huginn" else d.counts).float() for d in draws]
    mean = torch.stack([d.mean() for d in drawn]).mean().item()
    assert mean == pytest.approx(5.0 if scheme == "huginn" else 4.0, rel=0.15)
    # A micro-batch draws its rows of what the whole batch draws.
    part = sample_loops(sampled, 3, slice(2, 4))
    assert torch.equal(part.counts, draws[3].counts[2:]) if scheme == "parcae" else part == draws[3]


def test_sequences_of_different_depth_share_no_bias_per_visit():
    with pytest.raises(ValueError, match=r"'parcae' needs model\.balance = 'pooled'"):
        config(model={"loop": {"preset": "huginn"}, "balance": "per_visit"}, loops={"scheme": "parcae"})
    with pytest.raises(ValueError, match=r"'parcae' needs model\.router = 'shared'"):
        config(model={"loop": {"preset": "huginn"}, "router": "per_visit"}, loops={"scheme": "parcae"})


def test_any_seed_will_do():
    drawn = {_mix(seed, step, rank) for seed in range(3) for step in range(500) for rank in range(8)}
    assert len({number % 2**32 for number in drawn}) == 3 * 500 * 8
    torch.manual_seed(_mix(10**12, 5, 1))
    torch.Generator().manual_seed(_mix(10**12, 5, 1))


def test_without_git_a_run_has_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment(World(0, 1, torch.device("cpu")))["commit"] is None


def test_the_router_biases_move_once_per_update(tmp_path):
    run = lo.train(config(steps=4, valid_every=4, checkpoint_every=4, micro_batch=2), tmp_path / "run", progress=False)
    model, _ = lo.load(run)
    for name, buffer in model.named_buffers():
        if name.endswith("feedforward.bias"):
            assert buffer.abs().max() > 0
            assert buffer.abs().max() <= 4 * 5e-3 + 1e-7


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path):
    run = tmp_path / "run"
    lo.train(config(steps=6, valid_every=6), run, progress=False)
    with pytest.raises(
        ValueError, match=r"the (loss|gradient) of step \d+ is not finite.*; the last checkpoint, if any, is kept"
    ):
        lo.train(config(steps=100, optim={"lr": 1e6}), run, resume=True, force=True, progress=False)
    assert RunDir(run).latest() is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"max_length": 16}}, r"train.seq_len \(32\) must not exceed model.max_length \(16\)"),
        ({"optim": {"warmup": 12}}, r"optim.warmup \(12\) must be less than train.steps \(12\)"),
        ({"optim": {"min_lr": 1.0}}, r"optim.min_lr \(1.0\) must not exceed optim.lr"),
        ({"data": {"source": "synthetic:additon"}}, "addition"),
        ({"model": {"vocab_size": 100}}, "100"),
        ({"track": ["wandbb"]}, "track"),
        ({"model": {"layout": "3", "loop": {"preset": "none"}}, "loops": {"scheme": "huginn"}}, "needs a loop"),
        ({"model": {"layout": "3", "loop": {"preset": "none"}}, "loops": {"grad_loops": 1}}, "needs a loop"),
        (
            {"model": {"loop": {"preset": "vanilla"}}, "loops": {"grad_loops": 1}},
            "without a gradient: vanilla reads it",
        ),
        (
            {
                "model": {"loop": {"preset": "full_bandwidth", "options": {"token_shift": True}}},
                "data": {"mask_attention": True},
            },
            "full_bandwidth reads the state of the token before, which may be of another document; set data.mask_att",
        ),
        # Before the data is looked for.
        ({"model": {"loop": {"preset": "operlop"}}, "data": {"source": "/nothing", "options": {}}}, "unknown preset"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as error:
        lo.train(config(**change), tmp_path / "run", progress=False)
    assert "\n" not in str(error.value)


def cuda_out_of_memory():
    raise torch.OutOfMemoryError


# The CPU's error is the real one, of more than any machine has.
@pytest.mark.parametrize("allocate", [cuda_out_of_memory, lambda: torch.empty(2**55)])
def test_what_does_not_fit_the_memory_is_one_sentence(tmp_path, monkeypatch, allocate):
    def fails(run, step):
        allocate()

    monkeypatch.setattr(training, "update", fails)
    with pytest.raises(ValueError, match=r"4 sequences of 32 tokens do not fit the memory .*; set train\.micro_batch"):
        lo.train(config(), tmp_path / "run", progress=False)


def test_a_weight_decay_that_is_forced_is_used(straight, tmp_path, monkeypatch):
    run = shutil.copytree(straight, tmp_path / "run")
    decays = []
    monkeypatch.setattr(
        training,
        "_loop",
        lambda run, *_, **__: decays.extend(group["weight_decay"] for group in run.optimizer.param_groups),
    )
    lo.train(config(optim={"weight_decay": 0.7}, steps=13), run, resume=True, force=True, progress=False)
    assert set(decays) == {0.0, 0.7}


def test_tokens_are_counted_and_a_changed_schedule_is_shown_before_it_is_used(tmp_path, capsys):
    run = lo.train(config(steps=6, valid_every=6), tmp_path / "run", progress=False)
    lo.train(config(steps=6, valid_every=6), run, resume=True, progress=False)
    assert not capsys.readouterr().err
    changed = config(steps=9, valid_every=9, batch_size=6)
    lo.train(changed, run, resume=True, force=True, progress=False)
    assert list(losses(run, "tokens").values()) == [4 * 32 * n for n in range(7)] + [
        (24 + 6 * n) * 32 for n in (1, 2, 3)
    ]
    said = capsys.readouterr().err
    assert "train.batch_size: 4 -> 6; train.steps: 6 -> 9" in said and said.count("\n") == 1
    assert "the learning rate goes on at 0.000808 instead of 0.0003" in said
    # It goes on counting where it was.
    lo.train(config(steps=10, valid_every=10, batch_size=6), run, resume=True, force=True, progress=False)
    assert losses(run, "tokens")[10] == (24 + 6 * 4) * 32


def test_a_checkpoint_of_before_tokens_were_counted_has_as_many_as_its_config_says(tmp_path):
    run = lo.train(config(steps=3, valid_every=3), tmp_path / "run", progress=False)
    folder = RunDir(run).latest()
    record = json.loads((folder / "checkpoint.json").read_text())
    del record["tokens"]
    (folder / "checkpoint.json").write_text(json.dumps(record))
    sums = [line for line in (folder / "XXH128SUMS").read_text().splitlines(keepends=True) if ".json" not in line]
    for name in ("checkpoint.json", "index.json"):
        sums.append(f"{xxh3_128((folder / name).read_bytes()).hexdigest()}  {name}\n")
    (folder / "XXH128SUMS").write_text("".join(sums))
    lo.train(config(steps=4, valid_every=4, batch_size=8), run, resume=True, force=True, progress=False)
    assert losses(run, "tokens")[4] == (3 * 4 + 8) * 32


def test_a_run_that_is_renamed_while_it_is_trained_does_not_split_in_two(straight, tmp_path, monkeypatch):
    update, run = training.update, tmp_path / "run"

    def renames(state, step):
        if step == 5:
            run.rename(tmp_path / "elsewhere")
            # What logs may have come back; a checkpoint must not.
            run.mkdir()
        return update(state, step)

    monkeypatch.setattr(training, "update", renames)
    with pytest.raises(ValueError, match=r"was renamed or replaced during the training, .*; --resume the run whe"):
        lo.train(config(), run, progress=False)
    monkeypatch.undo()
    assert not (run / "checkpoints").exists()
    lo.train(config(), tmp_path / "elsewhere", resume=True, progress=False)
    assert losses(tmp_path / "elsewhere") == losses(straight)


def test_what_a_kill_after_the_last_checkpoint_left_goes_when_the_run_is_claimed(straight, tmp_path):
    run = shutil.copytree(straight, tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "step_000009", run / "checkpoints" / "step_000003")
    (run / "checkpoints" / ".step_000012.partial").mkdir()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = [run / f".config.toml.{socket.gethostname()}.{dead.pid}.0123abcd.partial"]
    left.append(run / "tokenizer" / f".tokenizer.json.{socket.gethostname()}.{dead.pid}.0123abcd.partial")
    mine = run / f".model.{socket.gethostname()}.{os.getpid()}.0123abcd.partial"
    for file in (*left, mine):
        file.touch()
    lo.train(config(), run, resume=True, progress=False)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000009", "step_000012"]
    assert not any(file.exists() for file in left) and mine.exists()
    assert losses(run) == losses(straight)


def test_a_run_is_not_overwritten_nor_continued_with_another_config(straight, tmp_path):
    with pytest.raises(ValueError, match="already holds a run; add --resume"):
        lo.train(config(), straight, progress=False)
    changed = config(optim={"lr": 1e-3})
    with pytest.raises(ValueError, match=r"has changed \(optim.lr: 0.003 -> 0.001\); undo that, or add --force"):
        lo.train(changed, straight, resume=True, progress=False)
    assert difference(config(), changed) == ["optim.lr: 0.003 -> 0.001"]


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=r"cannot write to .*; choose another --out"):
            lo.train(config(data={"source": "nowhere.txt"}), out, progress=False)


def test_checkpoints_without_a_config_are_somebodys(straight, tmp_path):
    shutil.copytree(straight / "checkpoints" / "step_000009", tmp_path / "checkpoints" / "step_000009")
    with pytest.raises(ValueError, match="already holds a run"):
        lo.train(config(), tmp_path, progress=False)


def test_a_run_that_came_while_the_data_was_packed_is_not_overwritten(tmp_path, monkeypatch):
    opened = training.open_data

    def meanwhile(*arguments, **options):
        monkeypatch.undo()
        lo.train(config(steps=3, valid_every=3, seed=1), tmp_path / "run", progress=False)
        return opened(*arguments, **options)

    monkeypatch.setattr(training, "open_data", meanwhile)
    with pytest.raises(ValueError, match="already holds a run"):
        lo.train(config(), tmp_path / "run", progress=False)
    assert lo.load_config(tmp_path / "run" / "config.toml").train.seed == 1


def test_other_data_is_not_continued_with(tmp_path):
    run = lo.train(config(steps=3, valid_every=3), tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"the data of .* has changed since its checkpoint"):
        lo.train(config(data={"options": {"digits": 3}}), run, resume=True, force=True, progress=False)


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path):
    run = lo.train(config(steps=3, valid_every=3), tmp_path / "run", progress=False)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match="does not fit the model of this config"):
        lo.train(config(model={"width": 64}), run, resume=True, force=True, progress=False)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    lo.load(run)


def test_a_run_can_be_used_without_its_data(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    data = {"source": str(text), "options": {}, "tokenizer": "bytes", "valid_fraction": 0.2}
    run = lo.train(config(data=data, steps=3, valid_every=3), tmp_path / "run", progress=False)
    moved = text.rename(tmp_path / "moved.txt")
    assert lo.load(run)[1].encode("fox") == [102, 111, 120]
    # The same text at another place is the same data.
    lo.train(
        config(data={**data, "source": str(moved)}, steps=5, valid_every=5),
        run,
        resume=True,
        force=True,
        progress=False,
    )


def test_two_processes_cannot_train_into_one_folder(tmp_path):
    with RunDir(tmp_path / "run").claim(), pytest.raises(ValueError, match="another process is at work in"):
        lo.train(config(), tmp_path / "run", progress=False)


def test_lines_of_metrics_that_are_none_are_dropped(tmp_path):
    run = lo.train(config(steps=3, valid_every=3), tmp_path / "run", progress=False)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"loss": 1}\n7\n\xff\xfe\n{"step": "x"}\n')
    lo.train(config(steps=4, valid_every=4), run, resume=True, force=True, progress=False)
    assert sorted(losses(run)) == [1, 2, 3, 4]


def test_sampled_loops_need_a_shared_transition(tmp_path):
    for loops in ({"scheme": "huginn"}, {"grad_loops": 1}):
        with pytest.raises(
            ValueError, match=r"train\.loops needs a transition shared over loops, which operloop is not"
        ):
            lo.train(config(loops=loops), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_cannot_be_loaded(tmp_path):
    with pytest.raises(ValueError, match="is neither a run nor an exported model"):
        lo.load(tmp_path)


@pytest.mark.parametrize(
    ("preset", "form"), [("operloop", None), ("operloop_bounded", "readable, for the projection BoundedRead")]
)
def test_a_transition_that_is_not_compiled_is_named(preset, form, tmp_path, monkeypatch, capsys):
    # What is compiled is compiled when it first runs.
    monkeypatch.setattr(training, "_loop", lambda *given, **named: None)
    lo.train(config(model={"loop": {"preset": preset}}, compile=True), tmp_path / "run")
    said = f"train.compile: blocks are compiled, but {preset} runs eagerly: its form is {form}"
    assert (said in capsys.readouterr().err) == (form is not None)
