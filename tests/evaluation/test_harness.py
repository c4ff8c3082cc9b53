"""The model under lm-eval: what it answers does not depend on how requests are batched, and cuts are counted."""

import types

import pytest
import torch
from hf_models import looped

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'looptim[eval]'")

from lm_eval.api.instance import Instance

from looptim.base.console import Progress
from looptim.data import Tokenizer
from looptim.evaluation import harness
from looptim.evaluation.answers import Answers
from looptim.loading import wrap
from looptim.rundir import Evaluation

pytestmark = pytest.mark.long

PRESETS = ("none", "vanilla", "hyperloop", "operloop")
TEXTS = [
    ("The sky", " is blue"),
    ("", "nothing before it"),
    ("a", "b"),
    ("a", "c"),
    ("A longer question, with a comma and a full stop. The answer is", " no"),
    ("Q: 1+1?\nA:", " two, which is " + "very " * 5 + "clear"),
    ("é", "ü"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.bytes().save(folder)
    return folder


def build(folder, *, batch_size, preset="operloop", **changes):
    model = looped(preset, **({"vocab_size": 257, "max_length": 128} | changes))
    wrapped = wrap(model)
    wrapped.generation_config.eos_token_id = 256
    return harness.Model(wrapped, folder, batch_size=batch_size)


def ask(kind, *arguments):
    return [Instance(kind, {}, args, index, ("task", index, 1)) for index, args in enumerate(arguments)]


@pytest.mark.parametrize("preset", PRESETS)
def test_log_likelihoods_do_not_depend_on_batch_size_or_padding(folder, preset):
    answers = {}
    for size in (1, 2, 3, 16):
        lm = build(folder, batch_size=size, preset=preset)
        answers[size] = lm.loglikelihood(ask("loglikelihood", *TEXTS))
    alone = [lm.loglikelihood(ask("loglikelihood", text))[0] for text in TEXTS]
    for other in (*answers.values(), alone):
        for (ours, greedy), (expected, also) in zip(other, answers[1], strict=True):
            assert ours == pytest.approx(expected, rel=1e-6)
            assert greedy == also


@pytest.mark.parametrize("preset", PRESETS)
def test_a_log_likelihood_is_the_model_s(folder, preset):
    """Against the bare model, without transformers, a cache or padding."""
    lm = build(folder, batch_size=8, preset=preset)
    model = looped(preset, vocab_size=257, max_length=128)
    for (context, continuation), (ours, _) in zip(TEXTS, lm.loglikelihood(ask("loglikelihood", *TEXTS)), strict=True):
        before = list(context.encode()) or [256]
        tokens = torch.tensor([before + list(continuation.encode())])
        with torch.no_grad():
            logits = model(tokens[:, :-1]).log_softmax(-1)[0, len(before) - 1 :]
        expected = logits.gather(1, tokens[0, len(before) :, None]).sum().item()
        assert ours == pytest.approx(expected, abs=1e-4)


def test_rolling_and_generation_do_not_depend_on_the_batch_size_either(folder):
    texts = [("x" * 300,), ("one two",), ("é" * 70,), ("a",)]
    stop = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    prompts = [("Q:", stop), ("A much longer prompt than the other", stop), ("1+1=", stop)]
    rolling, generated = [], []
    for size in (1, 8):
        lm = build(folder, batch_size=size)
        rolling.append(lm.loglikelihood_rolling(ask("loglikelihood_rolling", *texts)))
        generated.append(lm.generate_until(ask("generate_until", *prompts)))
        # Windows are made to fit, so nothing is cut.
        assert (lm.cut.requests, lm.cut.cut) == (3, 0)
    assert rolling[1] == pytest.approx(rolling[0], abs=1e-4)
    assert generated[1] == generated[0]


def test_prompts_that_do_not_fit_are_counted(folder):
    lm = build(folder, batch_size=4)
    lm.loglikelihood(ask("loglikelihood", ("x" * 200, "y"), ("x" * 128, "y"), ("x" * 129, "y")))
    assert (lm.cut.requests, lm.cut.cut, lm.cut.longest) == (3, 2, 201)
    with pytest.raises(ValueError, match="an answer to score has 200 tokens, but the context is 128"):
        lm.loglikelihood(ask("loglikelihood", ("x", "y" * 200)))
    lm.start(None, Progress("", show=False))
    options = {"until": ["\n"], "max_gen_toks": 8}
    lm.generate_until(ask("generate_until", ("x" * 121, options), ("x" * 120, options)))
    assert (lm.cut.cut, lm.cut.longest, lm.cut.given) == (1, 129, 0)


def test_a_task_that_would_generate_more_than_the_context_is_given_half_of_it(folder):
    lm = build(folder, batch_size=4, max_length=32)
    (text,) = lm.generate_until(ask("generate_until", ("x", {"until": [], "max_gen_toks": 1024})))
    assert (lm.cut.asked, lm.cut.given) == (1024, 16)
    assert len(text.encode()) <= 16 * 3


def test_known_answers_are_not_asked_for_again(folder, tmp_path, monkeypatch):
    requests = ask("loglikelihood", *TEXTS)
    lm = build(folder, batch_size=2)
    given = Answers(Evaluation(tmp_path, "task"), {})
    lm.start(given, Progress("", show=False))
    calls, stock = [], harness.HFLM._model_call

    def interrupted(self, inps, *args):
        calls.append(len(inps))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return stock(self, inps, *args)

    monkeypatch.setattr(harness.HFLM, "_model_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood(requests)
    again = Answers(Evaluation(tmp_path, "task"), {})
    assert len(again.known) >= 4
    lm.start(again, Progress("", show=False))
    asked = len(calls)
    answers = lm.loglikelihood(requests)
    assert sum(calls[asked:]) == 2
    assert lm.cut.requests == len(TEXTS)
    expected = build(folder, batch_size=16).loglikelihood(requests)
    assert [value for value, _ in answers] == pytest.approx([value for value, _ in expected], abs=1e-5)
    assert all(isinstance(answer, tuple) for answer in answers)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("loglikelihood_rolling", [("a text",), ("another, a longer one",)]),
        ("generate_until", [("x", {"until": ["\n"], "max_gen_toks": 4}), ("y", {"until": [], "max_gen_toks": 4})]),
    ],
)
def test_known_answers_of_other_kinds_are_not_asked_for_again_either(folder, tmp_path, monkeypatch, kind, arguments):
    lm, requests = build(folder, batch_size=2), ask(kind, *arguments)
    lm.start(Answers(Evaluation(tmp_path, "task"), {}), Progress("", show=False))
    answers = getattr(lm, kind)(requests)
    again = Answers(Evaluation(tmp_path, "task"), {})
    assert len(again.known) == 2
    lm.start(again, Progress("", show=False))
    for name in ("_model_call", "_model_generate"):
        monkeypatch.setattr(harness.HFLM, name, lambda *_, **__: pytest.fail("asked again"))
    assert getattr(lm, kind)(requests) == answers


class CodeTask:
    """What lm-eval makes of a task that executes code, as far as we look at it."""

    UNSAFE_CODE = True

    def __init__(self, **scope):
        function = types.FunctionType((lambda: None).__code__, scope)
        self._metric_fn_list = {"pass": function.__call__}


def test_code_runs_in_limited_processes_or_not_at_all():
    scope = {"whatever_its_name": types.SimpleNamespace(name="code_eval"), "other": 1}
    loaded = {"tasks": {"mbpp": CodeTask(**scope)}}
    metric = harness.isolate_code("mbpp", loaded)
    replaced = loaded["tasks"]["mbpp"]._metric_fn_list["pass"].__self__.__globals__
    assert metric is not None
    assert replaced["whatever_its_name"] is metric
    again = harness.isolate_code("mbpp", loaded)
    assert again is not metric
    assert replaced["whatever_its_name"] is again
    with pytest.raises(ValueError, match="cruxeval executes what the model writes by means that looptim cannot limit"):
        harness.isolate_code("cruxeval", {"tasks": {"cruxeval": CodeTask(other=1)}})


class Manager:
    """lm-eval's, without data: a tag of two tasks, one that lacks a package, one that wants to execute code."""

    all_tags = ("tag",)
    all_tasks = ("a", "b", "code", "package", "tag", "unasked")

    def load(self, names):
        (name,) = names
        if name == "package":
            raise ModuleNotFoundError("No module named 'langdetect'")
        if name == "code":
            raise ValueError('The "code_eval" metric executes untrusted code: set HF_ALLOW_CODE_EVAL="1"')
        if name == "unasked":
            # The variable is set in the user's shell, so that the metric does not object.
            return {"tasks": {name: CodeTask(metric=types.SimpleNamespace(name="code_eval"))}}
        parts = ("a", "b") if name == "tag" else names
        return {"tasks": {part: types.SimpleNamespace(_metric_fn_list={}) for part in parts}, "groups": {}}


def test_a_tag_is_its_tasks(monkeypatch):
    monkeypatch.setattr(harness, "TaskManager", Manager)
    loaded = harness.load_tasks(["tag"], allow_code=False)
    assert {name: list(part["tasks"]) for name, part in loaded.items()} == {"a": ["a"], "b": ["b"]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package", "task 'package' needs a package (No module named 'langdetect'); install it"),
        ("code", "code would execute what the model writes; permit it with --allow-code"),
        ("unasked", "unasked would execute what the model writes; permit it with --allow-code"),
        ("additon", "unknown task 'additon', did you mean 'addition'?"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(name, message, monkeypatch):
    monkeypatch.setattr(harness, "TaskManager", Manager)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        harness.load_tasks([name], allow_code=False)
    assert message in str(caught.value)
