"""The command line as a user meets it: a process, its output and its exit status."""

import json
import os
import re
import resource
import subprocess
import sys

import pytest
from support import LOOPTIM, RECIPES, run


def test_help_answers_fast_because_torch_is_not_imported():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("--help", env=os.environ | {"COLUMNS": "80"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The work it takes rather than the time it took: the machine may be busy.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0
    assert "zoo" in done.stdout
    assert "diagnose" in done.stdout
    # The first sentence of each verb's help fits its line.
    assert "..." not in done.stdout.partition("Commands:")[2]
    assert seconds < 0.3
    probe = "import sys, looptim, looptim.cli; assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


@pytest.mark.long
def test_zoo_prints_every_preset_with_its_verdict():
    done = run("zoo")
    assert done.returncode == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "W [y + ε, e]" in rows["recurrentgpt"]
    assert re.search(r"H_pre Y +I − H_res +1 +H_post .* no, reads H_pre +0\.78", rows["hyperloop"])
    assert re.search(r"H_in Y +Λ +η_l +H_in +½‖t − o‖² +yes +0\.00", rows["operloop"])


@pytest.mark.long
def test_zoo_speaks_json_and_markdown():
    rows = {row["name"]: row for row in json.loads(run("zoo", "--json").stdout)}
    assert rows["parcae"]["aligned"] is False
    assert rows["parcae"]["gap"] == pytest.approx(1.236, abs=1e-3)
    assert rows["parcae_aligned"]["gap"] == 0
    lines = run("zoo", "--markdown").stdout.splitlines()
    assert lines[0].startswith("| transition | rule | o | λ | η | x | L | aligned | gap |")
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


@pytest.mark.long
def test_bench_measures_in_a_recipe_of_mine():
    small = ["--set", "train.batch_size=1", "--set", "train.seq_len=16"]
    done = run("bench", "operloop", "--recipe", RECIPES / "nano.toml", *small, "--repeats", "1", "--json")
    assert [row["name"] for row in json.loads(done.stdout)["rows"]] == ["vanilla", "operloop"]
    assert run("bench", *small).stderr.startswith("looptim: --set changes a recipe; give --recipe too")


@pytest.mark.long
def test_diagnose_gives_the_verdict():
    assert (
        "hyperloop: mismatch; it reads through H_pre but writes through H_post" in run("diagnose", "hyperloop").stdout
    )
    answer = json.loads(run("diagnose", "operloop", "--json").stdout)
    assert answer["aligned"] is True
    assert answer["sentence"] == "operloop: aligned; it reads and writes through H_in."


@pytest.mark.long
def test_count_prints_components_conventions_and_ratios():
    loop, baseline = (str(RECIPES / "paper" / "18" / name) for name in ("loop6-operloop.toml", "baseline.toml"))
    text = run("count", loop, "--against", baseline, "--set", "data.mask_attention=true").stdout
    assert re.search(r"routed +2,415,919,104 +75,497,472 ", text)
    assert re.search(r"flops +without head +[\d,]+ +1\.667", text)
    assert "those of one document a sequence; data.mask_attention leaves fewer in training" in text
    answer = json.loads(run("count", baseline, "--json").stdout)
    assert answer["parameter_conventions"]["non-vocabulary without norms"] == 4_974_444_544
    assert answer["ratios"] is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["count", "missing.toml"], "there is no recipe 'missing.toml'"),
        (["count", str(RECIPES / "nano.toml"), "--set", "loop.preset=operlop"], "did you mean 'operloop'"),
        (["diagnose", "hyprloop"], "unknown preset 'hyprloop', did you mean 'hyperloop'?"),
        (["diagnose"], "Missing argument 'PRESET'"),
        (["zoo", "--steps", "0"], "steps must be a whole number of at least 1, got 0"),
        (["zoo", "--json", "--markdown"], "exclude each other"),
        (["zoo", "--wat"], "No such option: --wat"),
        (["zo"], "No such command 'zo'"),
        (["evaluate", "runs/x", "--risk", "0.1"], "--risk is what a threshold of an exit may cost; give --exits too"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


INTERRUPTED = """
import os, signal, sys
from looptim.__main__ import main
name, sent = sys.argv.pop(1), []
def interrupt(event, arguments):
    if event in ("import", "open") and str(arguments[0]).endswith(name) and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGINT))
sys.addaudithook(interrupt)
main()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "moment", ["typer", "looptim.cli", "torch", "torch._C", "numpy", "looptim.model.count", "nano.toml"]
)
def test_ctrl_c_within_the_first_second_is_one_line(moment):
    command = [sys.executable, "-c", INTERRUPTED, moment, "count", "nano"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "looptim: stopped\n")


@pytest.mark.long
def test_a_model_that_does_not_fit_the_memory_is_one_line(tmp_path):
    done = run("train", "smoke", "--out", str(tmp_path / "run"), "--no-export", "--set", "model.vocab_size=8000000000")
    assert done.returncode == 2 and done.stderr.startswith("looptim: the memory does not suffice; ")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_closed_pipe_is_no_traceback():
    done = subprocess.run(f"{LOOPTIM} zoo --json | head -1", shell=True, capture_output=True, text=True)
    assert done.stdout == "[\n"
    assert done.stderr == ""


def test_recipes_lists_what_other_verbs_take():
    rows = json.loads(run("recipes", "--json").stdout)
    named = {(row["kind"], row["name"]) for row in rows}
    assert {("recipe", "nano"), ("recipe", "paper/18/loop3-operloop"), ("study", "main")} <= named
    assert all(row["summary"] for row in rows)
    assert "paper/18/loop3-operloop" in run("recipes").stdout


@pytest.mark.long
def test_a_shipped_name_is_enough_in_any_folder(tmp_path):
    assert run("count", "nano", cwd=tmp_path).stdout.startswith("nano: 1-2x3-1 operloop")
    done = run("count", "recipes/nanoo.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'nano'?" in done.stderr


def test_config_lists_every_key_and_what_a_recipe_gives_it():
    rows = {row["name"]: row for row in json.loads(run("config", "nano", "--set", "train.seed=7", "--json").stdout)}
    assert rows["loop.preset"]["value"] == "operloop" and rows["loop.preset"]["default"] == "none"
    assert rows["train.seed"]["value"] == "7" and rows["train.seed"]["type"] == "int"
    assert rows["model.layout"]["default"] == "required" and rows["train.micro_batch"]["value"] == ""
    assert all(row["meaning"] for row in rows.values()), "give a new key a description"
    contract = (
        "model.layout model.width model.pattern model.vocab_size loop.preset loop.options data.source train.steps"
    )
    assert set(contract.split()) <= rows.keys()
    table = run("config").stdout
    assert all(name in table for name in rows)
    done = run("config", "--set", "train.seed=7")
    assert done.returncode == 2 and "give one too" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [("looptim tra", "train"), ("looptim train na", "nano"), ("looptim study ma", "main")],
)
def test_the_shell_completes_verbs_recipes_and_studies(words, expected):
    place = str(len(words.split()) - 1)
    environment = os.environ | {"_LOOPTIM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    assert expected in run(env=environment).stdout.split()


@pytest.mark.slow
def test_the_demo_ends_with_the_look_page(tmp_path):
    done = run("demo", cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().splitlines()[-1] == "open runs/demo/look.html in a browser"
    assert (tmp_path / "runs" / "demo" / "look.html").is_file()
