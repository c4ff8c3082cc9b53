"""Studies: a fair grid, paired by seed, that a kill cannot harm, and tables that follow from its runs."""

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import STUDIES, packed

import looptim as lo
from looptim.config import Config
from looptim.data import open_data
from looptim.model.lm import LoopedLM
from looptim.reporting.style import styles_of
from looptim.reporting.tables import markdown
from looptim.rundir import Run, RunDir
from looptim.studies.archive import pack
from looptim.studies.figures import _state_norm, draw
from looptim.studies.grid import Meter, is_finished
from looptim.studies.measures import Outcome, as_json, compare, outcomes, spikes, stability, state_growth
from looptim.studies.run import _Watch, load_plan
from looptim.studies.tables import tables

pytestmark = pytest.mark.long

RECIPE = """
[model]
layout = "1-1x2-1"
width = 16
vocab_size = 257
max_length = 32
tied = true
pattern = "SF"
heads = 2
kv_heads = 1
head_dim = 8
window = 8
sliding_rotary = 8
full_rotary = 4
dense_layers = 1
dense_hidden = 32
experts = 4
top_k = 2
expert_hidden = 8
shared_hidden = 8
init_std = 0.05
[loop]
preset = "operloop"
[data]
source = "synthetic:addition"
[optim]
lr = 3e-3
min_lr = 3e-4
warmup = 2
[train]
seq_len = 32
batch_size = 4
log_every = 1
valid_every = 6
valid_batches = 1
checkpoint_every = 2
keep_last = 1
"""

STUDY = """
title = "Two loops"
base = "recipe.toml"
tokens = 1536
seeds = [0, 1]
reference = "vanilla"
matched = false
[variants.vanilla]
preset = "vanilla"
[variants.operloop]
preset = "operloop"
against = "vanilla"
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "two.toml").write_text(STUDY)
    return tmp_path / "two.toml"


def changed(file, old, new):
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    return file


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "two.toml").write_text(STUDY)
    lo.study(folder / "two.toml", folder / "out", progress=False, watch=0.5)
    return folder


def results(out):
    return json.loads((out / "results.json").read_text())["variants"]


def test_a_study_leaves_a_table_figures_and_a_page(done):
    out = done / "out"
    names = {path.name for path in out.iterdir()}
    assert {"results.md", "results.tex", "results.csv", "results.json", "index.html", "study.json", "runs"} <= names
    assert "runs.zip" in names
    assert {"loss.png", "difference.png", "state_norm.png", "grad_norm.png"} <= names
    assert "loops.png" not in names
    page = packed((out / "index.html").read_text())
    assert page["watch"] is None
    assert [chart["key"] for chart in page["charts"]] == [
        "loss",
        "difference",
        "state before training",
        "state after training",
        "grad_norm",
    ]
    assert [group["name"] for group in page["groups"]] == ["vanilla", "operloop"]
    assert f"torch: {torch.__version__}" in page["notes"]
    assert len(list((out / "runs").iterdir())) == 4


def test_a_page_that_is_watched_shows_the_runs_that_train(done, tmp_path):
    plan, runs = load_plan(done / "two.toml"), tmp_path / "runs"
    watch = _Watch(plan, runs, tmp_path, 3600.0)
    watch()
    page = packed((tmp_path / "index.html").read_text())
    assert page["watch"] == 3600.0 and page["charts"] == []
    # One run is done, another has come to its third step.
    shutil.copytree(done / "out" / "runs" / plan.cells[0].name, runs / plan.cells[0].name)
    going = runs / plan.cells[1].name
    going.mkdir()
    lines = (done / "out" / "runs" / going.name / "metrics.jsonl").read_text().splitlines(keepends=True)
    (going / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 3))
    shutil.copy(done / "out" / "runs" / going.name / "config.toml", going)
    watch()
    assert packed((tmp_path / "index.html").read_text())["charts"] == [], "its time has not come"
    watch.next = 0
    watch()
    page = packed((tmp_path / "index.html").read_text())
    other = f"{plan.cells[1].variant}, seed {plan.cells[1].seed} (training)"
    assert [group["name"] for group in page["groups"]] == [plan.cells[0].variant, other]
    (line,) = (line for line in page["charts"][0]["lines"] if line["group"] == 1 and line["part"] == "training")
    assert len(line["x"]) == 3
    with pytest.raises(ValueError, match="follow runs that train"):
        lo.study(done / "two.toml", tmp_path, jobs=0, watch=1.0)


def test_the_table_follows_from_the_runs(done):
    rows = results(done / "out")
    losses = {}
    for variant in rows:
        for cell in (cell for cell in load_plan(done / "two.toml").cells if cell.variant == variant):
            lines = (done / "out" / "runs" / cell.name / "metrics.jsonl").read_text().splitlines()
            last = [json.loads(line) for line in lines if "valid_loss" in line][-1]
            assert last["step"] == 12
            losses[variant, cell.seed] = last["valid_loss"]
    difference = [losses["operloop", seed] - losses["vanilla", seed] for seed in (0, 1)]
    assert rows["operloop"]["loss"]["mean"] == pytest.approx((losses["operloop", 0] + losses["operloop", 1]) / 2)
    assert rows["operloop"]["loss_difference"]["values"] == pytest.approx(difference)
    assert rows["operloop"]["loss_against"] == rows["operloop"]["loss_difference"]
    # Of two variants the pooled residual is that of their differences.
    half = 12.706 * statistics.stdev(difference) / 2**0.5
    assert rows["operloop"]["loss_difference"]["half"] == pytest.approx(half, rel=1e-4)
    text = (done / "out" / "results.md").read_text()
    assert f"{rows['operloop']['loss']['mean']:.4f}" in text
    assert f"{statistics.mean(difference):+.4f} ± {rows['operloop']['loss_difference']['half']:.4f}" in text
    assert "| exact match minus its twin |" in text and "Twins: operloop: vanilla." in text
    assert rows["operloop"]["exact_match_against"] == rows["operloop"]["exact_match_difference"]
    # The number behind ± is no standard error.
    assert (done / "out" / "results.csv").read_text().startswith("table,row,column,value,half_width_95,mark\n")


def test_the_same_study_twice_has_the_same_numbers(done, tmp_path):
    lo.study(done / "two.toml", tmp_path / "again", progress=False)
    for name in ("results.json", "results.md", "results.tex", "results.csv", "loss.png"):
        assert (tmp_path / "again" / name).read_bytes() == (done / "out" / name).read_bytes(), name


def test_finished_runs_are_skipped_also_those_of_another_study(done, file, capfd):
    started = {path: path.stat().st_mtime_ns for path in (done / "out" / "runs").glob("*/metrics.jsonl")}
    changed(file, 'title = "Two loops"', 'title = "Three loops"')
    changed(file, "[variants.operloop]", '[variants.hyperloop]\npreset = "hyperloop"\n[variants.operloop]')
    lo.study(file, file.parent / "out", runs=done / "out" / "runs")
    assert {path: path.stat().st_mtime_ns for path in started} == started
    assert len(list((done / "out" / "runs").iterdir())) == 6
    assert "4 of 6 runs are done" in capfd.readouterr().err
    rows = results(file.parent / "out")
    assert list(rows) == ["vanilla", "hyperloop", "operloop"]
    assert rows["operloop"]["loss"] == results(done / "out")["operloop"]["loss"]
    assert list(rows["operloop"]) == list(results(done / "out")["operloop"])


@pytest.fixture
def archived(done, file):
    """The folder of a finished study of which only the archive is left."""
    (file.parent / "out").mkdir()
    shutil.copy(done / "out" / "runs.zip", file.parent / "out")
    return file.parent / "out"


def test_a_study_goes_on_from_its_archive_where_its_runs_are_gone(done, file, archived, capfd):
    lo.study(file, archived)
    assert "runs are done" not in capfd.readouterr().err
    for name in ("results.json", "results.md", "loss.png", "runs.zip"):
        assert (archived / name).read_bytes() == (done / "out" / name).read_bytes(), name
    assert not list(archived.glob("runs/*/checkpoints"))
    changed(file, "seeds = [0, 1]", "seeds = [1, 2]")
    lo.study(file, archived)
    assert "2 of 4 runs are done" in capfd.readouterr().err
    before, rows = results(done / "out"), results(archived)
    assert all(rows[name]["loss"]["values"][0] == before[name]["loss"]["values"][1] for name in before)
    # A seed that is left out stays in the archive.
    with zipfile.ZipFile(archived / "runs.zip") as zipped:
        assert len({name.partition("/")[0] for name in zipped.namelist()}) == 6


def test_an_archive_brings_only_what_is_missing(done, file, archived):
    cell = load_plan(file).cells[0]
    begun = archived / "runs" / cell.name
    shutil.copytree(done / "out" / "runs" / cell.name, begun)
    (begun / "mine").touch()
    lo.study(file, archived, progress=False)
    assert (begun / "mine").exists() and (begun / "checkpoints").exists()
    assert results(archived) == results(done / "out")


def test_a_damaged_archive_is_one_sentence(file, archived):
    archive = archived / "runs.zip"
    whole = archive.read_bytes()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("run/metrics.jsonl", bytes(range(256)) * 20)
    deflated = archive.read_bytes()
    spoilt = deflated[:60] + b"x" * 20 + deflated[80:]
    for harm in (whole[: len(whole) // 2], b"", whole.replace(whole[500:520], b"x" * 20), spoilt):
        archive.write_bytes(harm)
        with pytest.raises(ValueError, match=r"runs.zip is damaged \(.*\); get it again, or delete it to train the"):
            lo.study(file, archived, progress=False)
        assert [path.name for path in archived.iterdir()] == ["runs.zip"]


def test_a_run_that_came_to_another_end_replaces_what_was_packed_of_it(done, file):
    plan, archive = load_plan(file), file.parent / "runs.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr(f"{plan.cells[0].name}/diverged.txt", "why")
        zipped.writestr("another/config.toml", "")
    archive.write_bytes(pack(plan, done / "out" / "runs", archive))
    with zipfile.ZipFile(archive) as zipped, zipfile.ZipFile(done / "out" / "runs.zip") as whole:
        assert set(zipped.namelist()) == {*whole.namelist(), "another/config.toml"}


def stopped(file, number, jobs=1):
    """A study on the command line that got a signal in the middle of its second run, or of its first two at once."""
    # What runs the tests may ignore Ctrl-C, as a shell's background does, and its children would too.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from looptim.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "study", str(file), "--out", str(file.parent / "out")]
    command += ["--jobs", str(jobs)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    runs = file.parent / "out" / "runs"
    for _ in range(6000):
        written = [path.read_text().count("\n") for path in runs.glob("*/metrics.jsonl")]
        if len(written) == 2 and min(written) > 4:
            break
        time.sleep(0.02)
    os.kill(process.pid, number)
    _, err = process.communicate()
    # Its workers hold the runs: they must have ended with it.
    time.sleep(1.5)
    # A fast machine may have begun the third of four before the worker noticed.
    assert len(list(runs.iterdir())) in (2, 3)
    return process.returncode, err.decode()


@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_ctrl_c_and_sigterm_leave_a_checkpoint_and_say_how_to_go_on(file, number, jobs):
    # The last step of a run is far: it is stopped in the middle.
    last = 100 if jobs == 1 else 2000
    changed(file, "tokens = 1536", f"tokens = {128 * last}")
    changed(file.parent / "recipe.toml", "checkpoint_every = 2", "checkpoint_every = 9999")
    status, err = stopped(file, number, jobs)
    assert status == 130
    assert f"looptim: stopped; the same command continues {file.parent / 'out'}" in err
    assert "Traceback" not in err
    steps = sorted(int(path.name[5:]) for path in file.parent.glob("out/runs/*/checkpoints/step_*"))
    assert len(steps) == 2 and steps[0] < last
    assert (steps[1] == last) == (jobs == 1)
    # What is there can be seen before the study goes on.
    assert f"{4 - (jobs == 1)} of 4 runs are not finished" in (file.parent / "out" / "results.md").read_text()


def test_a_run_that_another_study_is_at_comes_last_and_is_waited_for(done, file):
    runs = shutil.copytree(done / "out" / "runs", file.parent / "runs")
    held, other, *_ = load_plan(file).cells
    for cell in (held, other):
        shutil.rmtree(runs / cell.name)
    with ThreadPoolExecutor() as pool:
        with RunDir(runs / held.name).claim():
            page = pool.submit(lo.study, file, file.parent / "out", runs=runs, progress=False)
            deadline = time.monotonic() + 300
            while not is_finished(other, runs):
                assert time.monotonic() < deadline, "the other run has waited too"
                time.sleep(0.1)
            time.sleep(3)
            assert not page.done()
        page.result()
    assert results(file.parent / "out") == results(done / "out")


@pytest.mark.parametrize("diverged", [True, False])
def test_a_run_that_another_study_settles_meanwhile_is_taken_as_it_is(done, file, diverged):
    runs = shutil.copytree(done / "out" / "runs", file.parent / "runs")
    held = load_plan(file).cells[0]
    left = shutil.move(runs / held.name, file.parent / "left")
    with ThreadPoolExecutor() as pool:
        with RunDir(runs / held.name).claim():
            page = pool.submit(lo.study, file, file.parent / "out", runs=runs, progress=False)
            deadline = time.monotonic() + 300
            while not (file.parent / "out" / "study.json").exists():
                assert time.monotonic() < deadline, "the study has not begun"
                time.sleep(0.1)
            if diverged:
                (runs / held.name / "diverged.txt").write_text("why")
            else:
                # As it comes out of an archive.
                shutil.rmtree(left / "checkpoints")
                shutil.copytree(left, runs / held.name, dirs_exist_ok=True)
        page.result()
    assert not (runs / held.name / "checkpoints").exists()
    rows = results(file.parent / "out")
    assert rows["vanilla"]["failures"] == ({"0": "why"} if diverged else {})
    assert (rows == results(done / "out")) != diverged


def test_sigterm_before_the_first_run_is_one_line(file):
    (file.parent / "text.txt").write_text("\n".join(f"{i} times {i + 7} is {i * (i + 7)}" for i in range(200_000)))
    changed(file.parent / "recipe.toml", "synthetic:addition", str(file.parent / "text.txt"))
    changed(file.parent / "recipe.toml", "vocab_size = 257", "vocab_size = 2048")
    command = [sys.executable, "-m", "looptim", "study", str(file), "--out", str(file.parent / "out")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("training a tokenizer"):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    assert process.wait() == 130
    assert rest.endswith(f"looptim: stopped; the same command continues {file.parent / 'out'}\n")
    assert "Traceback" not in rest
    assert not (file.parent / "out").exists()


def test_a_killed_study_continues_and_ends_with_the_same_table(done, file):
    stopped(file, signal.SIGKILL)
    lo.study(file, file.parent / "out", progress=False)
    for name in ("results.json", "results.md"):
        assert (file.parent / "out" / name).read_bytes() == (done / "out" / name).read_bytes()


def test_pairs_share_initial_weights_and_batches(file):
    changed(file, 'against = "vanilla"', '[variants.baseline]\npreset = "none"\nlayout = "4"')
    cells = load_plan(file).cells
    by_seed = {seed: [cell for cell in cells if cell.seed == seed] for seed in (0, 1)}
    weights = {}
    for seed, some in by_seed.items():
        states = [LoopedLM(cell.config.model, seed=cell.config.train.seed).state_dict() for cell in some]
        shared = set.intersection(*(set(state) for state in states))
        shared = {name for name in shared if not name.startswith("loops.")}
        # Everything but the transition, and the blocks that the baseline has for itself.
        assert shared == {name for name in states[0] if not name.startswith("loops.")}
        for name in shared:
            assert all(torch.equal(state[name], states[0][name]) for state in states), name
        weights[seed] = states[0]["blocks.1.attention.q.weight"]
        batches = []
        for cell in some:
            settings = cell.config.train
            data = open_data(
                cell.config.data, vocab_size=cell.config.model.vocab_size, seq_len=settings.seq_len, progress=False
            )
            rows = slice(0, settings.batch_size)
            batch = [
                data.batch("train", seed=settings.seed, step=step, batch_size=settings.batch_size, rows=rows)[0]
                for step in range(3)
            ]
            batches.append(torch.stack(batch))
        assert all(torch.equal(batch, batches[0]) for batch in batches)
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("name", ["alignment", "ablation", "roadmap"])
def test_variants_of_one_transition_share_its_initial_weights(name):
    """In every loop, also where one of them lacks a part that is drawn at random."""
    plan = load_plan(STUDIES / f"{name}.toml", scale="smoke")
    states = {v: LoopedLM(plan.config(v).model, seed=0).loops.state_dict() for v in plan.study.variants}
    compared = set()
    for variant, settings in plan.study.variants.items():
        twin = settings.against or plan.study.reference
        for key in states[variant].keys() & states[twin].keys() if variant != twin else ():
            assert torch.equal(states[variant][key], states[twin][key]), f"{variant}: {key}"
            compared.add(key)
    assert any(key.startswith("0.transitions.2.") and key.endswith("gate.W") for key in compared)


def test_stability_is_read_off_the_metrics():
    losses = [3.0] * 15 + [3.2] + [3.0] * 15 + [3.5] + [3.0] * 5
    lines = [{"step": i, "tokens": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    lines[0]["state_norm"], lines[-1]["state_norm"] = [0.5, 1.0, 2.0], [1.0, 1.0, 3.0]
    run = Run("x", lines, {}, {})
    assert spikes(run) == 1
    assert state_growth(run) == (4.0, 3.0)
    lines[0]["state_norm"], lines[-1]["state_norm"] = [1.0, 2.0, 8.0, 4.0, 4.0], [1.0, 1.0, 2.0, 4.0, 10.0]
    assert state_growth(Run("x", lines, {"model.layout": "1-1x1-1-2x2-1"}, {})) == (2.0, 5.0)
    assert state_growth(Run("x", lines[1:3], {}, {})) is None


def outcome_of(variant, losses, shares, norm):
    lines = [{"step": i, "tokens": i, "loss": 1.0, "grad_norm": value} for i, value in enumerate([99, *norm], 1)]
    data = {"content": "c0ffee", "valid_tokens": 100, "valid_documents": 3, "valid_bytes": 400, "valid_hash": "beef"}
    run = Run(variant, lines * 10, {}, {"env.json": json.dumps({"data": data})})
    return Outcome(variant, dict.fromkeys(losses, run), {}, losses, {}, shares, {})


def test_every_number_of_a_table_is_where_it_belongs(file):
    changed(file, 'against = "vanilla"', 'against = "huginn"\n[variants.huginn]\npreset = "huginn"')
    found = [
        outcome_of("vanilla", {0: 3.0, 1: 3.2}, {0: 0.10, 1: 0.30}, [1, 2, 9]),
        outcome_of("operloop", {0: 2.0, 1: 2.4}, {0: 0.50, 1: 0.70}, [1, 2, 9]),
        outcome_of("huginn", {0: 2.5, 1: 2.5}, {0: 0.20, 1: 0.20}, [1, 2, 9]),
    ]
    plan = load_plan(file)
    compared = compare(plan, found)
    text, rows = markdown(tables(plan, found, compared)), as_json(plan, found, compared)["variants"]["operloop"]
    assert rows["loss_difference"]["values"] == pytest.approx((-1.0, -0.8))
    assert rows["loss_against"]["values"] == pytest.approx((-0.5, -0.1))
    assert rows["exact_match_against"]["values"] == pytest.approx((0.3, 0.5))
    line = next(line for line in text.splitlines() if line.startswith("| operloop | 1-1x2-1"))
    values = [cell.strip().split(" ± ")[0] for cell in line.split("|")[6:-1]]
    bits = f"{2.2 / 4 / math.log(2):.4f}"
    assert values == ["**2.2000**", bits, "-0.9000", "3", "-0.3000", "60.0", "+40.0", "+40.0"]
    assert "Held out: 3 documents, 100 tokens, 400 bytes, hash beef." in " ".join(text.split())
    assert "to see 0.01 nats takes more than 999 seeds" in text
    assert "| <u>2.5000</u> ± 0.0000 |" in text and "| 3.1000 ±" in text
    steady = next(line for line in text.splitlines() if line.startswith("| operloop | 0 | 0.0"))
    # The largest is that after the first tenth.
    assert [cell.strip().split(" ± ")[0] for cell in steady.split("|")[4:6]] == ["5.50", "99.00"]
    assert stability(found[0])["gradient norm, median"].mean == 5.5


def test_two_looped_segments_are_two_lines_each_from_its_own_start():
    lines = [{"step": step, "tokens": step, "state_norm": [1.0, 2.0, 8.0, 4.0, 16.0]} for step in (0, 9)]
    run = Run("x", lines, {"model.layout": "1-1x1-1-2x2-1"}, {})
    picture = _state_norm([Outcome("x", {0: run}, {}, {}, {}, {}, {})], {"x": styles_of(["operloop"])[0]})
    assert picture is not None
    before = [line.get_xydata().tolist() for line in picture.figure.axes[0].lines if line.get_linestyle() != "None"]
    assert before == [[[0, 1], [1, 2]], [[2, 1], [3, 0.5], [4, 2]]]


def test_hyperloops_growth_at_initialization_is_measured(file):
    # FIELD: b_pre 1/r, b_post 0 with gain 2, b_res 1 at r streams: about three times as large after every loop.
    changed(file, 'preset = "operloop"', 'preset = "hyperloop"')
    changed(file, "seeds = [0, 1]", "seeds = [0]")
    lo.study(file, file.parent / "out", progress=False)
    growth = {
        name: row["stability"]["state growth, start"]["mean"] for name, row in results(file.parent / "out").items()
    }
    assert 5 < growth["operloop"] < 12
    assert growth["vanilla"] < 3


def test_one_seed_has_no_interval_and_says_so(file):
    changed(file, "seeds = [0, 1]", "seeds = [0]")
    lo.study(file, file.parent / "out", progress=False)
    assert results(file.parent / "out")["operloop"]["loss"]["half"] is None
    text = (file.parent / "out" / "results.md").read_text()
    assert "One seed only: there are no intervals" in text
    assert "±" not in text


def test_loops_are_drawn_over_depths(file):
    deeper = '[variants."operloop x3"]\npreset = "operloop"\nlayout = "1-1x3-1"'
    changed(file, 'against = "vanilla"', f"{deeper}\n{deeper.replace('op x3', 'op, two')}\noptions = {{ streams = 2 }}")
    changed(file, "tokens = 1536", "tokens = 400")
    changed(file, "seeds = [0, 1]", "seeds = [0]")
    lo.study(file, file.parent / "out", progress=False)
    assert (file.parent / "out" / "loops.png").is_file()
    plan = load_plan(file)
    found = outcomes(plan, file.parent / "out" / "runs")
    pictures = {picture.name: picture for picture in draw(plan, found, compare(plan, found))}
    (legend,) = pictures["loops"].figure.legends
    # A variant keeps its looks while others are missing.
    fewer = [found[0], *found[2:]]
    some = {picture.name: picture for picture in draw(plan, fewer, compare(plan, fewer))}
    looks = [
        {text.get_label(): text.get_color() for text in p["loss"].figure.legends[0].get_lines()}
        for p in (pictures, some)
    ]
    assert looks[1].items() < looks[0].items()
    # Models that differ in more than their depth are not joined by a line.
    assert [text.get_text() for text in legend.get_texts()] == ["vanilla", "operloop", "operloop, streams 2"]


def test_a_run_that_diverges_is_a_result_and_the_others_go_on(file, capfd):
    changed(file, 'against = "vanilla"', "options = { read_init = 0.4 }")
    changed(file, "seeds = [0, 1]", "seeds = [0]")
    # A learning rate no variant survives, for the others the study as it is.
    changed(file.parent / "recipe.toml", "lr = 3e-3", "lr = 1e30")
    lo.study(file, file.parent / "out", progress=False)
    rows = results(file.parent / "out")
    assert all("is not finite" in row["failures"]["0"] for row in rows.values())
    assert "did not finish: the" in (file.parent / "out" / "results.md").read_text()
    # It would diverge again: it is not tried again, not even where only the archive is left.
    shutil.rmtree(file.parent / "out" / "runs")
    capfd.readouterr()
    lo.study(file, file.parent / "out")
    assert "runs are done" not in capfd.readouterr().err
    assert results(file.parent / "out") == rows


def last_validation(text):
    return text[: text.rindex("{", 0, text.rindex("valid_loss"))]


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        ("metrics.jsonl", last_validation, "its metrics lack the last validation"),
        ("metrics.jsonl", lambda text: text.replace('"loss"', '"lost"', 1), "its metrics lack updates"),
        ("metrics.jsonl", lambda text: text.replace("{", "", 1), "line 1: it is not JSON"),
        ("env.json", lambda text: text[:99], "Unterminated|Expecting"),
        ("eval/addition.limit200.json", lambda text: "{}", "results"),
    ],
)
def test_a_damaged_run_is_named_before_others_are_trained(done, file, name, harm, message):
    runs = shutil.copytree(done / "out" / "runs", file.parent / "runs")
    folder = next(runs.glob("operloop*"))
    (folder / name).write_text(harm((folder / name).read_text()))
    changed(file, "seeds = [0, 1]", "seeds = [0, 1, 2]")
    with pytest.raises(ValueError, match=f"the run {folder} is damaged .*({message}).*; delete it to train it again"):
        lo.study(file, file.parent / "out", runs=runs, progress=False)
    assert len(list(runs.iterdir())) == len(list((done / "out" / "runs").iterdir()))


def test_other_data_is_noticed_before_others_are_trained(done, file):
    runs = shutil.copytree(done / "out" / "runs", file.parent / "runs")
    folder = next(runs.glob("operloop*"))
    record = json.loads((folder / "env.json").read_text())
    record["data"]["vocab_size"] = 7
    (folder / "env.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"the run vanilla.* and the run {folder.name} in .* see different data"):
        lo.study(file, file.parent / "out", runs=runs, progress=False)
    changed(file, "seeds = [0, 1]", "seeds = [0, 1, 2]")
    with pytest.raises(ValueError, match=f"the runs that are missing and the run {folder.name} in .* see different"):
        lo.study(file, file.parent / "out", runs=runs, progress=False)
    assert len(list(runs.iterdir())) == len(list((done / "out" / "runs").iterdir()))


def test_a_last_validation_that_is_no_number_is_a_failure_of_its_run(done, file):
    runs = shutil.copytree(done / "out" / "runs", file.parent / "runs")
    metrics = next(runs.glob("operloop*_s1_*")) / "metrics.jsonl"
    *lines, last = metrics.read_text().splitlines()
    lines.append(json.dumps({**json.loads(last), "valid_loss": float("nan")}))
    metrics.write_text("\n".join(lines) + "\n")
    lo.study(file, file.parent / "out", runs=runs, progress=False)
    assert "NaN" not in (file.parent / "out" / "results.json").read_text()
    rows = results(file.parent / "out")
    assert rows["operloop"]["seeds"] == [0] and rows["vanilla"]["seeds"] == [0, 1]
    assert "operloop, seed 1, did not finish: its last validation" in (file.parent / "out" / "results.md").read_text()


def test_a_run_that_fails_stops_those_beside_it(file):
    changed(file, "tokens = 1536", "tokens = 256_000")
    failing, other, *_ = load_plan(file).cells
    runs = file.parent / "out" / "runs"
    (runs / failing.name / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ValueError, match="directory"):
        lo.study(file, file.parent / "out", jobs=2, progress=False)
    assert not (runs / other.name / "checkpoints" / "step_002000").exists()


def test_names_with_brackets_are_shown(file, monkeypatch, capsys):
    changed(file, "[variants.operloop]", '[variants."operloop [a]"]')
    plan = load_plan(file)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run = file.parent / plan.cells[1].name
    run.mkdir()
    (run / "diverged.txt").write_text("why")
    meter = Meter(plan, plan.cells, file.parent, show=True)
    with meter.progress:
        meter.finished(plan.cells[1])
    assert "operloop [a], seed 0: why (1 of 4 runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("matched = false", "matched = true", r"2% off those of 'vanilla': 'operloop' takes 1\.\d+ times as many; "),
        (
            "matched = false",
            'matched = false\nset = ["train.loops.scheme=huginn"]',
            "'operloop' does not build: train.loops",
        ),
        (
            'preset = "operloop"',
            'preset = "operlop"',
            r"variant 'operloop' does not build: unknown preset 'operlop', did",
        ),
        ('preset = "operloop"', 'preset = "operloop"\noptions = { stream = 2 }', r"variant 'operloop' does not build"),
        ('preset = "operloop"', 'preset = "operloop"\nlayout = "1-x"', r"variant 'operloop': .*does not parse"),
        ('reference = "vanilla"', 'reference = "baseline"', r"reference 'baseline' is no variant; known: vanilla"),
        ('against = "vanilla"', 'against = "none"', "is against 'none', which is no other variant"),
        ('against = "vanilla"', 'against = "operloop"', "'operloop' is against 'operloop', which is no other variant"),
        ("seeds = [0, 1]", "seeds = []", "seeds"),
        ("seeds = [0, 1]", "seeds = [1, 1]", "name one twice"),
        ("seeds = [0, 1]", "seeds = [0, -1]", r"seeds\.1: .*, got -1"),
        ('against = "vanilla"', '[scales.tiny]\nbase="recipe.toml"\ntokens=1\nseeds=[1, 1]', "name one twice"),
        ("matched = false", 'matched = false\nset = ["train.steps=3"]', r"'train.steps=3' would .* from its tokens"),
        ("matched = false", 'matched = false\nset = ["loop.options.streams=2"]', "would change nothing"),
        ("tokens = 1536", "tokens = 0", "tokens"),
        ("tokens = 1536", "token = 1536", "unknown key 'token', did you mean 'tokens'"),
        ('base = "recipe.toml"', 'base = "nothing.toml"', r"toml: its base .*nothing.toml. does not exist"),
        ("matched = false", 'matched = false\nset = ["data.source=/nothing"]', "'/nothing' matches no file"),
        ('title = "Two loops"', 'title = "Two loops', "is not valid TOML"),
    ],
)
def test_a_wrong_study_is_one_sentence_and_no_folder(file, old, new, message):
    with pytest.raises(ValueError, match=message) as error:
        lo.study(changed(file, old, new), file.parent / "out", progress=False)
    assert "\n" not in str(error.value)
    assert not (file.parent / "out").exists()


def test_folders_and_scales_that_do_not_fit(done, file):
    with pytest.raises(ValueError, match="there is no study"):
        lo.study(file.parent / "no.toml", file.parent / "out")
    with pytest.raises(ValueError, match="has no scale 'smoke'; it has none"):
        lo.study(file, file.parent / "out", scale="smoke")
    with pytest.raises(ValueError, match="jobs must be at least 1, or 0 to train nothing, got -1"):
        lo.study(file, file.parent / "out", jobs=-1)
    changed(file, "tokens = 1536", "tokens = 2048")
    with pytest.raises(ValueError, match=r"another study \(variant operloop: train.steps: 12 -> 16; variant vanilla: "):
        lo.study(file, done / "out")
    with pytest.raises(
        ValueError, match=r"cannot write to .*two.toml/out: .*two.toml is not a folder you may write to"
    ):
        lo.study(file, file / "out")


def test_a_key_that_looptim_gains_does_not_make_another_study(done, file):
    shutil.copytree(done / "out", file.parent / "out")
    record = file.parent / "out" / "study.json"
    before = json.loads(record.read_text())
    # Whichever keys it gained.
    before["variants"] = {
        name: Config(**values).model_dump(mode="json", exclude_defaults=True)
        for name, values in before["variants"].items()
    }
    assert all("mask_attention" not in values["data"] for values in before["variants"].values())
    record.write_text(json.dumps(before))
    lo.study(file, file.parent / "out", progress=False)
    assert results(file.parent / "out") == results(done / "out")


def test_changes_must_fit_the_length_of_a_run_not_the_bases(file):
    changed(file.parent / "recipe.toml", "seq_len = 32", "seq_len = 32\nsteps = 5")
    assert load_plan(file, set=["optim.warmup=11"]).cells[0].config.train.steps == 12
    with pytest.raises(
        ValueError, match=r"variant 'vanilla': optim.warmup \(12\) must be less than train.steps \(12\)"
    ):
        load_plan(file, set=["optim.warmup=12"])


def test_flops_of_sampled_loops_are_those_of_the_mean_depth(file):
    changed(file, 'preset = "operloop"', 'preset = "vanilla"\nlayout = "1-1x4-1"')
    assert load_plan(file).flops("operloop") > 1.3
    assert load_plan(file, set=["train.loops.scheme=huginn"]).flops("operloop") == 1


def test_what_a_scale_does_not_say_is_the_studys(file):
    changed(file, 'against = "vanilla"', 'against = "vanilla"\n\n[scales.long]\ntokens = 3072')
    whole, long = load_plan(file), load_plan(file, scale="long")
    assert long.tokens == 2 * whole.tokens
    assert long.study.seeds == whole.study.seeds and long.study.base == whole.study.base
    changed(file, "[scales.long]\ntokens = 3072", "[scales.long]\nseeds = [5]")
    other = load_plan(file, scale="long")
    assert other.tokens == whole.tokens and other.study.seeds == (5,)


def test_a_layout_that_every_variant_has_for_itself_is_not_set(file):
    load_plan(file, set=["model.layout=1-1x3-1"])
    changed(file, 'preset = "vanilla"', 'preset = "vanilla"\nlayout = "1-1x2-1"')
    changed(file, 'preset = "operloop"', 'preset = "operloop"\nlayout = "1-1x2-1"')
    with pytest.raises(ValueError, match=r"'model.layout=1-1x3-1' would change nothing"):
        load_plan(file, set=["model.layout=1-1x3-1"])


def test_a_finished_run_of_another_config_is_noticed(done, file):
    shutil.copytree(done / "out" / "runs", file.parent / "runs")
    cell = load_plan(file).cells[0]
    changed(file.parent / "runs" / cell.name / "config.toml", "weight_decay = 0.1", "weight_decay = 0.9")
    with pytest.raises(ValueError, match=r"has another config \(optim.weight_decay: 0.9 -> 0.1\); give another --out"):
        lo.study(file, file.parent / "out", runs=file.parent / "runs", progress=False)


def test_a_study_of_a_task_needs_transformers_from_the_start(file, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="a study of a task asks its runs through transformers"):
        lo.study(file, file.parent / "out", progress=False)
    assert not (file.parent / "out").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_record_of_a_study_is_one_sentence(file, text):
    (file.parent / "out").mkdir()
    (file.parent / "out" / "study.json").write_text(text)
    with pytest.raises(ValueError, match=r"study\.json is damaged; delete it"):
        lo.study(file, file.parent / "out")


def test_the_shipped_studies_are_matched_or_say_why():
    files = sorted(STUDIES.glob("*.toml"))
    assert {file.stem for file in files} >= {"main", "alignment", "loops", "ablation", "roadmap"}
    for file in files:
        plan = load_plan(file)
        assert len(plan.cells) >= 2
        lines = file.read_text().splitlines()
        unmatched = [index for index, line in enumerate(lines) if line == "matched = false"]
        assert all(lines[index - 1].startswith("# ") for index in unmatched), file
        assert plan.study.matched != bool(unmatched)


@pytest.mark.slow
def test_the_shipped_studies_are_matched_at_every_scale():
    for file in sorted(STUDIES.glob("*.toml")):
        for scale in load_plan(file).study.scales:
            assert len(load_plan(file, scale=scale).cells) >= 2
