"""From a run to results, against lm-eval itself; what is done is not done again, and mistakes are one sentence."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'looptim[eval]'")

from looptim.evaluation import evaluate
from looptim.hf.export import export
from looptim.loop.depth import Exit, Fixed

pytestmark = pytest.mark.long

COMMON = """
import json, sys
from pathlib import Path
from looptim.evaluation import evaluate

def samples(run, task, limit):
    return json.loads((Path(run) / "eval" / "samples" / f"{task}.limit{limit}.json").read_text())
"""

AGAINST_STOCK = (
    COMMON
    + """
run, limit = sys.argv[1], int(sys.argv[2])
tasks = sys.argv[3].split(",")
ours = evaluate(run, tasks=tasks, limit=limit, batch_size=3, allow_code="humaneval" in tasks)
import lm_eval.tasks
from lm_eval.evaluator import evaluate as stock_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
import looptim.hf
root = Path(lm_eval.tasks.__file__).parent
# The whole index takes long.
manager = TaskManager(include_defaults=False, include_path=[root / name for name in ("arc", "lambada", "gsm8k")])
loaded = manager.load(tasks)
for task in loaded["tasks"].values():
    task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
    task.set_fewshot_seed(seed=1234)
theirs = stock_evaluate(HFLM(pretrained=f"{run}/model", device="cpu", batch_size=1), loaded, limit=limit)
for task in tasks:
    for key, value in ours["results"][task].items():
        expected = theirs["results"][task][key]
        assert abs(value - expected) <= 1e-4 * max(1, abs(expected)), (task, key, value, expected)
    for mine, stock in zip(samples(run, task, limit), theirs["samples"][task], strict=True):
        for a, b in zip(mine["resps"], stock["resps"], strict=True):
            a, b = a[0], b[0]
            if isinstance(b, str):
                assert a == b, (task, a, b)
            else:
                a, b = (a[0], b[0]) if isinstance(b, tuple) else (a, b)
                assert abs(a - b) <= 1e-4 * max(1, abs(b) / 100), (task, a, b)
again = evaluate(f"{run}/model", tasks=tasks, limit=limit, batch_size=5, allow_code=True, out=f"{run}/eval")
assert again["results"] == ours["results"]
print(json.dumps(ours))
"""
)


def test_numbers_are_those_of_lm_eval_on_the_exported_folder(run, few, python):
    done = python(few, AGAINST_STOCK, run, 1, "arc_easy,lambada_openai,gsm8k")
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert {"arc_e", "lambada", "lambada_ppl", "gsm8k", "gsm8k_flexible"} == set(answer["scores"])
    assert answer["averages"]["LL Avg."] is None
    assert any("gsm8k: 1 of 1 requests do not fit the context of 512 tokens" in note for note in answer["notes"])
    # The exported folder has the same weights, so what the run has is not evaluated again.
    assert done.stderr.count("done before, in") == 3
    record = json.loads((run / "eval" / "gsm8k.limit1.json").read_text())
    assert record["settings"]["num_fewshot"] == 5
    assert record["settings"]["model"]["loops"] == 2
    assert record["settings"]["model"]["context_length"] == 512
    assert record["settings"]["seeds"]["fewshot"] == 1234
    assert (record["batch_size"], record["versions"]["lm_eval"]) == (3, "0.4.13")
    assert set(record["results"]) >= {"exact_match,strict-match", "exact_match,flexible-extract"}
    assert not list((run / "eval").glob(".p*"))


OFFLINE = """
import sys
from looptim.evaluation import evaluate
try:
    evaluate(sys.argv[1], suite="paper", limit=1, allow_code=True)
except ValueError as error:
    print(error)
"""


def test_offline_it_says_at_once_what_is_missing(run, tmp_path, python):
    start = time.monotonic()
    done = python(tmp_path / "nothing", OFFLINE, run)
    assert done.returncode == 0, done.stderr[-2000:]
    assert time.monotonic() - start < 60
    assert done.stdout.startswith("data sets that are not cached, and the hub is not reachable: ")
    assert "openai/gsm8k (for gsm8k, gsm8k_cot)" in done.stdout
    assert "cais/mmlu (for mmlu_generative)" in done.stdout
    assert f"set HF_HOME to a folder that has them (it is {tmp_path / 'nothing'})" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"suite": "papr"}, "unknown suite 'papr', did you mean 'paper'?"),
        ({"tasks": ["arc_esy"]}, "unknown task 'arc_esy', did you mean 'arc_easy'?"),
        ({"suite": "paper"}, "humaneval and humaneval_plus would execute what the model writes; permit it with"),
        ({"suite": "ppl", "limit": 0}, "limit must be at least 1, got 0"),
        ({"suite": "ppl", "batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"suite": "reasoning", "loops": 0}, "loops must be a whole number of at least 1, got 0"),
        ({"tasks": "arc_esy"}, "unknown task 'arc_esy'"),
    ],
)
def test_mistakes_are_one_sentence(run, arguments, message, monkeypatch):
    from looptim.evaluation import offline, suites

    # The index of all tasks takes nine seconds; a folder of them will do.
    monkeypatch.setitem(suites.FOLDERS, "arc_esy", "arc")
    monkeypatch.setattr(offline, "_answers", lambda *_: True)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        evaluate(run, quiet=True, **arguments)
    assert message in str(caught.value)


def test_a_path_without_a_model_is_one_sentence(run, tmp_path):
    with pytest.raises(ValueError, match="is neither a run nor an exported model"):
        evaluate(tmp_path, suite="ppl")
    (tmp_path / "config.toml").write_text((run / "config.toml").read_text())
    with pytest.raises(ValueError, match="has no complete checkpoint yet"):
        evaluate(tmp_path, suite="ppl")


def test_reasoning_by_generation_is_recorded_and_not_repeated(run, tmp_path, capsys):
    answer = evaluate(run, suite="reasoning", limit=3, batch_size=2)
    assert set(answer["results"]) == {"addition", "hop", "chain", "state"}
    assert all(0 <= result["exact_match,none"] <= 1 for result in answer["results"].values())
    record = json.loads((run / "eval" / "addition.limit3.json").read_text())
    assert record["settings"]["knobs"] == {"digits": 3, "reverse": True}
    assert record["settings"]["model"]["exit_rule"].startswith("none")
    capsys.readouterr()
    assert evaluate(run, suite="reasoning", limit=3) == answer
    exported = export(run, tmp_path / "exported")
    evaluate(exported, tasks="addition", limit=3, quiet=True)
    again = json.loads((exported / "eval" / "addition.limit3.json").read_text())
    assert (again["settings"], again["results"]) == (record["settings"], record["results"])
    capsys.readouterr()
    evaluate(run, suite="reasoning", limit=3)
    assert capsys.readouterr().err.count("done before") == 4
    evaluate(run, tasks=["addition"], limit=3, loops=3)
    other = json.loads((run / "eval" / "addition.loops3.limit3.json").read_text())
    assert other["settings"]["model"]["loops"] == 3
    capsys.readouterr()
    evaluate(run, tasks=["addition"], limit=3, depth=Fixed(3))
    assert "done before" in capsys.readouterr().err
    with pytest.raises(ValueError, match="both say how deep to go; give only one"):
        evaluate(run, tasks=["addition"], loops=3, depth=Exit())
    exits = Exit("change", 0.5, patience=1)
    evaluate(run, tasks=["addition"], limit=1, depth=exits, out=tmp_path, quiet=True)
    [file] = tmp_path.glob("addition.loopschange*.json")
    assert json.loads(file.read_text())["settings"]["model"]["exit_rule"] == str(exits)


def test_a_task_is_asked_with_the_knobs_it_was_trained_with(run):
    from looptim.evaluation import tasks as reasoning
    from looptim.evaluation.subject import _trained

    assert _trained(run) == {"addition": {"digits": 3}}
    trained = {"addition": {"digits": 3, "loss_on_prompt": True}}
    assert reasoning.settings("addition", trained)["knobs"] == {"digits": 3, "reverse": True}
    assert reasoning.settings("hop", trained) == reasoning.settings("hop", {})


def test_problems_longer_than_the_context_are_counted(run, tmp_path):
    from looptim.base.console import Progress
    from looptim.evaluation import tasks as reasoning
    from looptim.evaluation.answers import Answers
    from looptim.evaluation.subject import open_subject
    from looptim.rundir import Evaluation

    subject = open_subject(run, None)
    settings = {"knobs": {"length": 600, "hops": 2, "symbols": 4}, "limit": 2}
    answers = Answers(Evaluation(tmp_path, "hop"), settings)
    record = reasoning.run("hop", subject, settings, answers, batch_size=2, progress=Progress("", show=False))
    assert record["results"]["exact_match,none"] == 0
    assert "hop: 2 of 2 problems do not fit the context of 512 tokens" in record["notes"][0]


def test_a_task_stopped_in_the_middle_continues(run, tmp_path, monkeypatch, capsys):
    from looptim.evaluation import tasks as reasoning

    asked, stock = [], reasoning.complete

    def recorded(model, tokenizer, prompts, **options):
        asked.extend(prompts)
        return stock(model, tokenizer, prompts, **options)

    def interrupted(*arguments, **options):
        if len(asked) == 4:
            raise KeyboardInterrupt
        return recorded(*arguments, **options)

    monkeypatch.setattr(reasoning, "complete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, tasks=["addition"], limit=6, batch_size=2, out=tmp_path)
    assert capsys.readouterr().err.endswith("addition (1/1): stopped; the same command continues from here\n")
    before = list(asked)
    asked.clear()
    monkeypatch.setattr(reasoning, "complete", recorded)
    evaluate(run, tasks=["addition"], limit=6, batch_size=2, out=tmp_path)
    assert len(asked) == 2
    assert not set(asked) & set(before)
    assert [path.name for path in tmp_path.iterdir()] == ["addition.limit6.json"]


def test_a_batch_too_large_for_the_memory_is_one_sentence(run, tmp_path, monkeypatch):
    from looptim.evaluation import tasks as reasoning

    def too_large(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(reasoning, "complete", too_large)
    with pytest.raises(
        ValueError, match="addition does not fit the memory in batches of 7; give a smaller --batch-size"
    ):
        evaluate(run, tasks=["addition"], limit=2, batch_size=7, out=tmp_path, quiet=True)


def test_answers_stay_until_the_result_is_written(run, tmp_path, monkeypatch):
    from looptim.rundir import Evaluation

    def full(*_):
        raise ValueError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "write", full)
        with pytest.raises(ValueError, match="no room"):
            evaluate(run, tasks=["addition"], limit=2, out=tmp_path, quiet=True)
    assert (tmp_path / ".partial" / "addition.limit2.jsonl").read_bytes().count(b"\n") == 3


INTERRUPTED = """
import signal, sys
# A shell starts what it puts in the background with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from looptim.evaluation import evaluate
print(evaluate(sys.argv[1], tasks=["lambada_openai", "arc_challenge"], limit=100, batch_size=4)["results"])
"""


@pytest.mark.slow
def test_ctrl_c_loses_nothing(run, few, environment):
    command = [sys.executable, "-c", INTERRUPTED, str(run)]
    first = subprocess.Popen(command, env=environment(few), stderr=subprocess.PIPE, text=True)
    done, partial = (
        run / "eval" / name for name in ("lambada_openai.limit100.json", ".partial/arc_challenge.limit100.jsonl")
    )
    deadline = time.monotonic() + 300
    while not (partial.is_file() and len(partial.read_bytes().splitlines()) > 20) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    first.wait(60)
    assert done.is_file()
    kept = len(partial.read_bytes().splitlines())
    assert kept > 20
    again = subprocess.run(command, env=environment(few), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "lambada_openai (1/2): done before" in again.stderr
    assert not partial.exists()
    record = json.loads((run / "eval" / "arc_challenge.limit100.json").read_text())
    fresh = subprocess.run([*command[:-1], str(run / "model")], env=environment(few), capture_output=True, text=True)
    expected = json.loads((run / "model" / "eval" / "arc_challenge.limit100.json").read_text())
    assert fresh.returncode == 0
    assert record["results"] == expected["results"]
    assert record["context"] == expected["context"]


EVERY_ROW = """
import sys
from looptim.evaluation import evaluate
from looptim.evaluation import SUITES
plain = [task for task in SUITES["paper"] if task not in ("mmlu_generative", "bbh_cot_fewshot")]
evaluate(sys.argv[1], tasks=plain, limit=2, batch_size=8, allow_code=True)
evaluate(sys.argv[1], tasks=["mmlu_generative", "bbh_cot_fewshot"], limit=1, batch_size=8)
"""


@pytest.mark.slow
def test_every_row_of_the_paper_is_that_of_the_command_of_lm_eval(tmp_path, python, environment, make_run, everything):
    """Answer by answer, both filters of GSM8K, code and groups too, at the paper's context."""
    run = make_run(tmp_path / "run", max_length=4096)
    done = python(everything, EVERY_ROW, run)
    assert done.returncode == 0, done.stderr[-2000:]
    ours = {path.stem: json.loads(path.read_text()) for path in (run / "eval").glob("*.json")}
    assert len(ours) == 13
    stock: dict[str, dict] = {}
    for name, record in ours.items():
        if record["task"] == "mmlu_generative":
            _command(
                run, tmp_path / name, environment(everything), [record["task"], "--num_fewshot", "5", "--limit", "1"]
            )
        elif record["task"] == "bbh_cot_fewshot":
            _command(run, tmp_path / name, environment(everything), [record["task"], "--limit", "1"])
    plain = ",".join(sorted(record["task"] for record in ours.values() if record["settings"]["limit"] == 2))
    _command(run, tmp_path / "plain", environment(everything), [plain, "--limit", "2"])
    for path in tmp_path.glob("*/*/results_*.json"):
        stock |= json.loads(path.read_text())["results"]
    answers: dict[str, list] = {}
    for path in tmp_path.glob("*/*/samples_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        answers[path.name.removeprefix("samples_").rsplit("_", 1)[0]] = lines
    for name, record in ours.items():
        for key, value in record["results"].items():
            assert value == pytest.approx(stock[record["task"]][key], rel=1e-4, abs=1e-9), (name, key)
        left = {task: iter(lines) for task, lines in answers.items()}
        for sample in json.loads((run / "eval" / "samples" / f"{name}.json").read_text()):
            other = next(left[sample["task"]])
            assert sample["prompt_hash"] == other["prompt_hash"]
            for mine, theirs in zip(sample["resps"], other["resps"], strict=True):
                _same(mine[0], theirs[0])


def _command(run: Path, out: Path, environment: dict[str, str], tasks: list[str]) -> None:
    command = [str(Path(sys.executable).with_name("lm_eval")), "--model", "hf", "--device", "cpu", "--batch_size", "8"]
    command += ["--model_args", f"pretrained={run / 'model'},trust_remote_code=True", "--tasks", *tasks]
    command += ["--output_path", str(out), "--log_samples", "--confirm_run_unsafe_code"]
    done = subprocess.run(command, env=environment | {"HF_ALLOW_CODE_EVAL": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def _same(mine, theirs) -> None:
    """Texts to the letter, log-likelihoods to 1e-4 (stock samples have them as text)."""
    if isinstance(mine, list):
        assert float(mine[0]) == pytest.approx(float(theirs[0]), rel=1e-6, abs=1e-4)
    elif isinstance(mine, float):
        assert mine == pytest.approx(float(theirs), rel=1e-6, abs=1e-4)
    else:
        assert mine == theirs


def test_the_command_prints_what_it_found_and_where_it_lies(run):
    command = [sys.executable, "-m", "looptim", "evaluate", str(run), "--tasks", "addition", "--limit", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "addition" in line)
    result = json.loads((run / "eval" / "addition.limit3.json").read_text())["results"]
    assert "exact_match" in row and f"{result['exact_match,none']:.4f}" in row
    assert f"{run / 'eval'}: written; `looptim report {run}` makes the paper's tables" in done.stdout
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=300)
    assert json.loads(again.stdout)["results"]["addition"] == result
