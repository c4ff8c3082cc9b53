"""Folders and files that a stranger made are data: they execute nothing, write nowhere else, and fail in a sentence."""

import csv
import json
import os
import pickle
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from support import config, run
from transformers import AutoModelForCausalLM

import looptim as lo
from looptim.base import code
from looptim.base.files import claimed
from looptim.data import Tokenizer
from looptim.rundir import RunDir
from looptim.studies import archive

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    lo.train(config(steps=3), folder, progress=False)
    lo.export(folder)
    return folder


@pytest.fixture
def exported(trained, tmp_path):
    return Path(shutil.copytree(trained / "model", tmp_path / "exported"))


class Bomb:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize(
    "change",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel"},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
        {"transformers_weights": "../../other.safetensors", "tp_plan": "auto", "use_kernels": True},
    ],
)
def test_what_a_config_says_besides_the_model_is_not_followed(exported, monkeypatch, change):
    monkeypatch.chdir(exported)
    settings = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(settings | change))
    (exported / "evil.py").write_text("open('executed', 'w')")
    model, tokenizer = lo.load(exported)
    assert lo.generate(model, tokenizer, "1+", max_new_tokens=2, temperature=0) is not None
    assert not (exported / "executed").exists()


def test_pickled_weights_are_not_loaded(exported, monkeypatch):
    monkeypatch.chdir(exported)
    (exported / "model.safetensors").unlink()
    torch.save({"x": Bomb()}, exported / "pytorch_model.bin")
    (exported / "training_args.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="safetensors"):
        lo.load(exported)
    assert not (exported / "executed").exists()


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", DEEP, "is not the config of a model"),
        ("config.json", "[]", "is not the config of a model"),
        ("config.json", '{"model_type": "llama"}', "is of a model of type 'llama'"),
        ("config.json", '{"model_type": "looptim", "dtype": "evil"}', "dtype must be one of"),
        ("adapter_config.json", '{"base_model_name_or_path": "evil/model"}', "has an adapter beside its model"),
        ("generation_config.json", "[1]", "cannot be read"),
        ("generation_config.json", DEEP, "cannot be read"),
        ("model.safetensors", "x" * 1000, "model.safetensors|cannot be read"),
        ("tokenizer_config.json", DEEP, "is not a tokenizer_config.json"),
        ("tokenizer_config.json", '{"eos_token": 5}', "eos_token must be a text, got 5"),
        ("tokenizer_config.json", '{"eos_token": "absent"}', "has no token that ends a document"),
        ("tokenizer.json", DEEP, "is not a tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "has no token that ends"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_a_sentence(exported, file, text, message):
    (exported / file).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        lo.load(exported)
    assert "\n" not in str(caught.value)


def test_an_index_of_weights_leads_nowhere_else(exported, tmp_path):
    (exported / "model.safetensors").rename(tmp_path / "other.safetensors")
    for index in ("[]", "{}", '{"metadata": {}, "weight_map": {"a": "../../absent.safetensors"}}'):
        (exported / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=r"cannot be read|do not fit|safetensors"):
            lo.load(exported)


def test_a_tokenizer_larger_than_the_model_is_a_sentence(exported):
    Tokenizer.train(["a few words " * 50], vocab_size=262).save(exported)
    with pytest.raises(ValueError, match=r"has 26\d tokens, but the model 257; give it the one it was trained with"):
        lo.load(exported)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("env.json", "secret"),
        ("eval", "."),
        ("report", "."),
        ("metrics.jsonl", "secret"),
        ("checkpoints/step_000009", "."),
        ("eval/.partial/addition.jsonl", "secret"),
    ],
)
def test_no_link_of_a_run_leads_out_of_it(trained, tmp_path, name, target):
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    if (folder / name).is_file():
        (folder / name).unlink()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(outside / target)
    for verb in (
        lambda: lo.report(folder),
        lambda: lo.evaluate(folder, tasks=["addition"], limit=2, quiet=True),
        lambda: lo.train(config(steps=3), folder, resume=True, progress=False),
        lambda: lo.export(folder),
    ):
        with pytest.raises(ValueError, match="is a link that leads out of"):
            verb()
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "secret"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["eval/x.json", "checkpoints/step_000003/index.json", "tokenizer/tokenizer.json"])
def test_a_pipe_in_a_run_is_not_waited_for(trained, tmp_path, name):
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for verb in (lambda: lo.load(folder), lambda: lo.report(folder), lambda: lo.export(folder)):
        with pytest.raises(ValueError, match="is neither a file nor a folder; remove it"):
            verb()


def test_a_link_inside_a_run_and_to_a_run_is_fine(trained, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    (folder / "latest").symlink_to("checkpoints")
    (tmp_path / "link").symlink_to(folder)
    assert lo.report(tmp_path / "link").is_file()


def test_a_lock_that_is_a_link_empties_no_file(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="cannot write to"), claimed(tmp_path / "run"):
        pass
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize(
    "name",
    ["../evil/config.toml", "/evil/config.toml", "run/../../evil", "run\\..\\evil", "C:evil/x", "evil", "a/b/c/d"],
)
def test_an_archive_has_files_of_runs_only(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "runs.zip", "w") as zipped:
        zipped.writestr(name, "evil")
    with pytest.raises(ValueError, match=r"runs.zip is damaged \(it has .*, which is no file of a run\)"):
        archive._read(tmp_path / "runs.zip")


def test_an_archive_that_would_fill_the_memory_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "runs.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        for index in range(20):
            with zipped.open(f"run{index}/metrics.jsonl", "w") as file:
                for _ in range(64):
                    file.write(bytes(1 << 20))
    assert (tmp_path / "runs.zip").stat().st_size < 2 << 20
    with pytest.raises(ValueError, match=r"runs.zip is damaged \(it would take 1342177280 bytes\)"):
        archive._read(tmp_path / "runs.zip")
    # A size that is a lie does not help: no more than it says is unpacked.
    whole = (tmp_path / "runs.zip").read_bytes()
    (tmp_path / "runs.zip").write_bytes(whole.replace((1 << 26).to_bytes(4, "little"), (9).to_bytes(4, "little")))
    with pytest.raises(ValueError, match=r"runs.zip is damaged \(Bad CRC"):
        archive._read(tmp_path / "runs.zip")


@pytest.mark.parametrize(
    "text",
    [
        DEEP + "\n",
        '{"step": 1' + "0" * 4000 + ', "tokens": 1, "loss": 1}\n',
        '{"step": 1, "tokens": 1e999, "loss": "<script>"}\n',
        '{"step": -5, "tokens": NaN, "loss": [[]]}\n',
        '{"step": 1, "tokens": 1, "loss": {"a": {"b": []}}}\n',
    ],
)
def test_metrics_that_are_none_are_a_sentence(trained, tmp_path, text):
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    (folder / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"metrics.jsonl line 1: .*; repair or remove the line"):
        lo.report(folder)


def test_an_evaluation_that_is_none_is_a_sentence(trained, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "run"))
    lo.evaluate(folder, tasks=["addition"], limit=2, quiet=True)
    (file,) = (folder / "eval").glob("*.json")
    whole = json.loads(file.read_text())
    for harm in (
        {"results": 5}, {"results": {"exact_match,none": "<script>"}}, {"task": ["x"]}, {"settings": {}}, {"notes": 7},
        {"settings": {"model": [], "limit": 2}}, {"samples": {"addition": "x"}},
        {"settings": whole["settings"] | {"model": whole["settings"]["model"] | {"loops": "x", "flops_per_token": 0}}},
    ):  # fmt: skip
        file.write_text(json.dumps(whole | harm))
        with pytest.raises(ValueError, match="is not a result of `looptim evaluate`; repair or remove it"):
            lo.report(folder)
    file.write_text(DEEP)
    with pytest.raises(ValueError, match="is not a result of `looptim evaluate`; repair or remove it"):
        lo.report(folder)


NAMES = ("=HYPERLINK(1)", "<script>alert(1)</script>", "$\\frac$", "_hidden", "\\input{x}", "a\x1b[2J`b`", "[a](b)|c")


@pytest.mark.skipif(sys.platform == "win32", reason="such names cannot be")
def test_the_report_of_runs_with_hostile_names_is_inert(trained, tmp_path, recwarn):
    folders = [Path(shutil.copytree(trained, tmp_path / name.replace("/", "⁄"))) for name in NAMES]
    for folder in folders:
        lo.evaluate(folder, tasks=["addition"], limit=2, quiet=True)
    page = lo.report(folders, tmp_path / "out").read_text()
    # Names are in the data of the page, which is packed; its script sets them as text.
    assert "alert(1)" not in page
    assert "\x1b" not in page + (tmp_path / "out" / "tables.md").read_text()
    # Every name is in the legend, as it is.
    assert not [each for each in recwarn if "legend" in str(each.message)]
    assert "<script>" not in (tmp_path / "out" / "loss.svg").read_text()
    rows = (tmp_path / "out" / "tables.csv").read_text().splitlines()
    assert not [row for row in rows for cell in row.split(",") if cell.strip('"')[:1] in "=+@" and cell.strip('"')]


def test_the_results_of_a_study_with_hostile_names_are_inert(tmp_path):
    (tmp_path / "recipe.toml").write_text(config(data={"source": str(tmp_path / "text.txt"), "options": {}}).to_toml())
    (tmp_path / "text.txt").write_text("".join(f"line {n} of {n * n}\n" for n in range(600)))
    hostile = ["=HYPERLINK(1)", "<script>alert(1)</script>", "\\input{x}$\\frac$", "[a](b)|c`d`\x1b[2J_e", "@SUM(1)"]
    presets = ["vanilla", "huginn", "operloop", "hyperloop", "recirculation"]
    variants = "".join(f"[variants.{json.dumps(n)}]\npreset = '{p}'\n" for n, p in zip(hostile, presets, strict=True))
    head = f"title = {json.dumps(hostile[1] + hostile[2])}\nbase = 'recipe.toml'\ntokens = 384\nseeds = [0]\n"
    (tmp_path / "study.toml").write_text(f"{head}matched = false\nreference = '{hostile[0]}'\n{variants}")
    page = lo.study(tmp_path / "study.toml", tmp_path / "out", progress=False).read_text()
    text = {kind: (tmp_path / "out" / f"results.{kind}").read_text() for kind in ("csv", "md", "tex")}
    cells = [cell for row in csv.reader(text["csv"].splitlines()) for cell in row]
    assert "'=HYPERLINK(1)" in cells and not [cell for cell in cells if cell[:1] in ("=", "+", "@")]
    assert "<script>alert" not in page and "<script>" not in text["md"].replace("\\<", "")
    assert not re.search(r"(?<!\\)\[a\]|(?<!\\)\$", text["md"])
    assert r"\input" not in text["tex"] and r"\frac" not in text["tex"]
    assert "\x1b" not in page + "".join(text.values())
    figures = [file.read_text() for file in (tmp_path / "out").glob("*.svg")]
    assert figures and not [svg for svg in figures if "<script>" in svg]


def test_a_message_does_not_steer_the_terminal(tmp_path):
    done = run("generate", "a\x1b[2J\nb", "x", cwd=tmp_path)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr and done.stderr.count("\n") == 1


def test_a_study_of_a_stranger_is_read_and_not_executed(tmp_path):
    (tmp_path / "study.toml").write_text("x = " + "[" * 50_000)
    (tmp_path / "recipe.toml").write_text("x = " + "[" * 50_000)
    for verb in (["study", "study.toml"], ["train", "recipe.toml"]):
        done = run(*verb, "--out", "out", cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.toml", "study.toml"]


NAMED = "evil.py:mine"
EVIL = "open('executed', 'w')\nimport looptim\nmine = looptim.PRESETS['operloop']\n"
ASKED = r"evil.py:mine is code that a file asks for, and it was not run; .* allow it with --import evil.py"


@pytest.fixture
def naming(trained, tmp_path, monkeypatch):
    """A current folder with a run, an exported model, a recipe and a study that name code, and the code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(code, "ALLOWED", {})
    (tmp_path / "evil.py").write_text(EVIL)
    shutil.copytree(trained, "run")
    for file in (Path("run/config.toml"), Path("run/model/config.json")):
        assert file.read_text().count('"operloop"') == 1
        file.write_text(file.read_text().replace('"operloop"', f'"{NAMED}"'))
    shutil.copy("run/config.toml", "recipe.toml")
    Path("study.toml").write_text(
        'title = "x"\nbase = "recipe.toml"\ntokens = 512\nseeds = [0]\nreference = "a"\n'
        f'[variants.a]\npreset = "operloop"\n[variants.b]\npreset = "{NAMED}"\n'
    )
    return tmp_path


OPENED = {
    "load": lambda: lo.load("run"),
    "load an export": lambda: lo.load("run/model"),
    "transformers": lambda: AutoModelForCausalLM.from_pretrained("run/model"),
    "export": lambda: lo.export("run"),
    "evaluate": lambda: lo.evaluate("run", tasks=["addition"], limit=2, quiet=True),
    "look": lambda: lo.look("run", "1+1"),
    "train": lambda: lo.train(lo.load_config("recipe.toml"), "out", progress=False),
    "resume": lambda: lo.train(lo.load_config("recipe.toml"), "run", resume=True, progress=False),
    "count": lambda: lo.count(lo.load_config("recipe.toml")),
    "plan": lambda: lo.plan(lo.load_config("recipe.toml"), gpus=1),
    "study": lambda: lo.study("study.toml", "out", progress=False),
}


@pytest.mark.parametrize("verb", OPENED)
def test_code_that_a_file_names_is_not_executed(naming, verb):
    with pytest.raises(ValueError, match=ASKED):
        OPENED[verb]()
    assert not Path("executed").exists() and not Path("out").exists()


def test_what_a_study_sets_is_a_wish_of_its_file_too(naming):
    text = Path("study.toml").read_text()
    wish = f"set = [\"model={{loop={{preset='{NAMED}'}}}}\"]\n"
    for place in ("seeds", "preset"):
        Path("study.toml").write_text(text.replace(place, wish + place))
        with pytest.raises(ValueError, match=r"is code that a file asks for|would change nothing"):
            lo.study("study.toml", "out", progress=False)
        assert not Path("executed").exists()


def test_the_report_of_a_run_that_names_code_is_made_without_it(naming):
    assert lo.report("run").is_file()
    assert not Path("executed").exists()


def test_code_that_a_file_names_is_executed_where_the_user_allows_it(naming):
    generating = ["generate", "run", "1+", "--max-new-tokens", "2"]
    refused = run(*generating)
    assert refused.returncode == 2 and "--import evil.py or --trust-code" in refused.stderr
    assert not Path("executed").exists()
    for arguments in ([*generating, "--import", "evil.py"], ["count", "recipe.toml", "--trust-code"]):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr
        Path("executed").unlink()


def test_a_run_directory_that_is_no_run_is_a_sentence(tmp_path):
    for name, text in (("config.toml", DEEP), ("config.toml", "\0"), ("env.json", DEEP)):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / name).write_text(text)
        (folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 1, "loss": 1}\n')
        if name == "env.json":
            RunDir(folder).read()
        else:
            with pytest.raises(ValueError, match="is not valid TOML"):
                RunDir(folder).read()
