"""Stock tasks of lm-eval on a model that is already in memory; the only importer of lm_eval."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import io
import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import datasets
import lm_eval.tasks
import numpy as np
import torch
from lm_eval import evaluator
from lm_eval.api.model import CacheHook, hash_args
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from ..base.choices import nearest
from ..base.console import Progress
from ..data import GRADED, TASKS
from .answers import Answers
from .sandbox import CodeEval
from .suites import CODE, FOLDERS, SHOTS, refusal

VERSION = importlib.metadata.version("lm_eval")
# The decorator that registers the function hides its type.
_Stock: Any = HFLM

SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
"""The seeds of lm-eval's own command."""

CHATTY = ("lm_eval", "datasets", "evaluate", "transformers", "huggingface_hub")


class _Nowhere(io.TextIOBase):
    """Takes text, and stays open for whoever has kept it."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' running commentary; what matters in it is counted and stands in the result."""
    levels = {name: logging.getLogger(name).level for name in CHATTY}
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # lm-eval shows bars that cannot be switched off, and prints.
    nowhere = _Nowhere()
    try:
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


def load_tasks(names: Sequence[str], *, allow_code: bool) -> dict[str, Any]:
    """What lm-eval loads for each name, data sets included. What is missing is one sentence about all of it."""
    root = Path(lm_eval.tasks.__file__).parent
    if all(name in FOLDERS for name in names):
        folders = sorted({root / FOLDERS[name] for name in names})
        manager = TaskManager(include_defaults=False, include_path=list(folders))
    else:
        manager = TaskManager()
    for name in names:
        if name not in manager.all_tasks:
            hint = nearest(name, [*TASKS, *GRADED, *manager.all_tasks])
            raise ValueError(f"unknown task {name!r}{hint} neither looptim nor lm-eval {VERSION} has it")
    loaded, missing = {}, {}
    # Code tasks are loaded last: importing their metric takes seconds, which are lost if another task is missing.
    for name in sorted(names, key=lambda name: name in CODE):
        try:
            if name in CODE:
                with quiet():
                    datasets.load_dataset_builder(CODE[name])
            if name not in CODE or not missing:
                loaded[name] = _load(manager, name)
        except ImportError as error:
            raise ValueError(f"task {name!r} needs a package ({error}); install it, or leave the task out") from None
        except (OSError, ValueError, RuntimeError) as error:
            if "HF_ALLOW_CODE_EVAL" in str(error):
                raise ValueError(refusal([name])) from None
            missing.setdefault(_what_is_missing(error), []).append(name)
    if missing:
        raise MissingDataError(missing)
    chosen = {}
    for name in names:
        if isolate_code(name, loaded[name]) and not allow_code:
            raise ValueError(refusal([name]))
        # A tag is no more than its tasks, and has no number of its own.
        parts = loaded[name]["tasks"] if name in manager.all_tags else {}
        chosen |= {part: {"tasks": {part: task}} for part, task in parts.items()} or {name: loaded[name]}
    return chosen


def _load(manager: TaskManager, name: str) -> Any:
    if name in CODE:
        # lm-eval sets up its log when it is imported, so the streams must still be the real ones.
        importlib.import_module("evaluate")
    with quiet():
        return manager.load([name])


class MissingDataError(ValueError):
    """Data sets that are neither cached nor to be had."""

    def __init__(self, tasks: dict[str, list[str]]):
        self.tasks = tasks
        super().__init__(", ".join(f"{what} (for {', '.join(names)})" for what, names in tasks.items()))


def _what_is_missing(error: Exception) -> str:
    for pattern in (r"Couldn't reach '([^']+)'", r"Couldn't find cache for (\S+)", r"Dataset '([^']+)' doesn't exist"):
        if found := re.search(pattern, str(error)):
            return found[1]
    if "code_eval" in str(error):
        return "the metric code_eval"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def num_fewshot(name: str, loaded: dict[str, Any]) -> int | None:
    """Sets the paper's few-shot number, or the task's own, and returns it; None if the parts of a group differ."""
    numbers = set()
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        # A task that says 0 shots means it; lm-eval does the same.
        wanted = own if own == 0 else SHOTS.get(name, own or 0)
        task.set_config(key="num_fewshot", value=wanted)
        task.set_fewshot_seed(seed=SEEDS["fewshot"])
        numbers.add(wanted)
    return numbers.pop() if len(numbers) == 1 else None


def isolate_code(name: str, loaded: dict[str, Any]) -> CodeEval | None:
    """Put our limited processes where a code task calls the `code_eval` metric; nothing else of it changes."""
    metric = CodeEval()
    isolated = set()
    for part, task in loaded["tasks"].items():
        for function in task._metric_fn_list.values():
            # lm-eval keeps the bound `__call__` of a function.
            scope = getattr(getattr(function, "__self__", function), "__globals__", {})
            for variable, value in scope.items():
                if getattr(value, "name", None) == CodeEval.name:
                    scope[variable] = metric
                    isolated.add(part)
        if getattr(task, "UNSAFE_CODE", False) and part not in isolated:
            raise ValueError(f"{name} executes what the model writes by means that looptim cannot limit; leave it out")
    return metric if isolated else None


def run(lm: Model, loaded: dict[str, Any], *, limit: int | None) -> Any:
    """The results of one task or group, as lm-eval's own command gives them."""
    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])
    torch.manual_seed(SEEDS["torch"])
    # Consent to run code was asked for before the task was loaded.
    return evaluator.evaluate(lm=lm, task_dict=loaded, limit=limit, log_samples=True, confirm_run_unsafe_code=True)


def _key(kind: str, arguments: tuple[Any, ...]) -> str:
    """What an answer is kept under; a sampled one is drawn anew each time."""
    sampled = kind == "generate_until" and arguments[1].get("do_sample")
    return "sampled" if sampled else hash_args(kind, arguments)


@final
class _Hook(CacheHook):
    """lm-eval calls it with every answer."""

    def __init__(self, add: Callable[[str, Any], None]):
        super().__init__(None)
        self.add = add

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self.add(_key(attr, tuple(req)), res)


@dataclasses.dataclass
class Cut:
    """How many requests did not fit the context; what lm-eval cuts is the start of the prompt."""

    requests: int = 0
    cut: int = 0
    longest: int = 0
    """Length in tokens, including those to be generated."""
    asked: int = 0
    """Tokens a task wants to generate."""
    given: int = 0
    """The smaller number it gets if the context is not longer than what it wants."""

    def see(self, length: int, room: int) -> None:
        self.requests += 1
        self.cut += length > room
        self.longest = max(self.longest, length)


@final
class Model(_Stock):
    """The model as lm-eval sees it: stock but for counting, progress, and answers that survive a kill."""

    def __init__(self, wrapped: Any, tokenizer: Path, *, batch_size: int):
        with quiet():
            super().__init__(pretrained=wrapped, tokenizer=str(tokenizer), batch_size=batch_size)
        self.answers: Answers | None = None
        self.progress = Progress("", show=False)
        self.cut = Cut()
        self.rolling = False
        self.set_cache_hook(_Hook(self._answered))

    def start(self, answers: Answers | None, progress: Progress) -> None:
        """Get ready for another task."""
        self.answers, self.progress, self.cut = answers, progress, Cut()

    def _answered(self, key: str, answer: Any) -> None:
        if self.answers is not None and key != "sampled":
            self.answers.add(key, answer)
        self.progress.advance()

    def _known(self, kind: str, requests: list[Any], ask: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """The answers to all requests; the model is asked only for those that are not known yet."""
        known = {} if self.answers is None else self.answers.known
        keys = [_key(kind, request.args) for request in requests]
        open_requests = [request for request, key in zip(requests, keys, strict=True) if key not in known]
        self.progress.expect(len(requests), len(requests) - len(open_requests))
        fresh = iter(ask(open_requests) if open_requests else [])
        # The open problems are fixed before the model is asked, since `known` grows meanwhile.
        asked = {id(request) for request in open_requests}
        restored = tuple if kind == "loglikelihood" else (lambda answer: answer)
        return [
            next(fresh) if id(request) in asked else restored(known[key])
            for request, key in zip(requests, keys, strict=True)
        ]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        for request in requests:
            # Problems without an answer yet are counted when they are asked.
            if self.answers is not None and _key("loglikelihood", request.args) in self.answers.known:
                context, continuation = request.args
                pair = self._encode_pair(context, continuation) if context else ([0], self.tok_encode(continuation))
                self.cut.see(sum(map(len, pair)), self.max_length + 1)
        return self._known("loglikelihood", requests, lambda some: super(Model, self).loglikelihood(some, True))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        def ask(some: list[Any]) -> list[Any]:
            answers = []
            # lm-eval answers nothing before it has read everything, so it is given a few documents at a time.
            for first in range(0, len(some), self.batch_size):
                answers += super(Model, self).loglikelihood_rolling(some[first : first + self.batch_size], True)
            return answers

        self.rolling = True
        try:
            return self._known("loglikelihood_rolling", requests, ask)
        finally:
            self.rolling = False

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None) -> Any:
        # lm-eval cuts rolling windows to the model's length itself.
        for _, context, continuation in () if self.rolling else requests:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"an answer to score has {len(continuation)} tokens, but the context is {self.max_length}; "
                    "evaluate this task with a model of longer context, or leave it out"
                )
            self.cut.see(len(context) + len(continuation), self.max_length + 1)
        return super()._loglikelihood_tokens(requests, True, override_bs)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        if not getattr(self.model.base_model, "caches", True):
            raise ValueError(
                "lm-eval generates through a KV cache, which a model with a token shift or a window of 1 token cannot "
                "have; leave out the tasks that generate"
            )
        fitting = [self._fit(request) for request in requests]
        return self._known("generate_until", fitting, lambda some: super(Model, self).generate_until(some, True))

    def _fit(self, request: Any) -> Any:
        """The request, counted. lm-eval refuses to generate as much as the context holds: then half of it is given."""
        prompt, options = request.args
        wanted = int(normalize_gen_kwargs(options, self.max_gen_toks).get("max_gen_toks", 0))
        given = wanted if wanted < self.max_length else self.max_length // 2
        self.cut.see(len(self.tok_encode(prompt)) + given, self.max_length)
        if given == wanted:
            return request
        self.cut.asked, self.cut.given = max(self.cut.asked, wanted), given
        return dataclasses.replace(request, arguments=(prompt, {**options, "max_gen_toks": given}))
