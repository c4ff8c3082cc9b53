"""From a run or an exported folder to results on disk, task by task."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..base.console import Progress, duration
from ..base.markup import Answer
from ..data import GRADED, TASKS
from ..loading import load
from ..loop import Depth
from ..loop.depth import Fixed
from ..rundir import Evaluation, RunDir
from . import graded, offline
from . import tasks as reasoning
from .answers import Answers, remove_answers
from .averages import averages, scores
from .sandbox import check_isolation, uncontained
from .subject import Subject, device, open_subject
from .suites import CODE, choose, refusal

if TYPE_CHECKING:
    from .harness import Model

PACKAGES = ("looptim", "lm_eval", "torch", "transformers", "datasets", "tokenizers", "numpy")


def evaluate(
    path: str | Path,
    *,
    suite: str | None = None,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    loops: int | None = None,
    depth: Depth | None = None,
    allow_code: bool | Literal["unisolated"] = False,
    out: str | Path | None = None,
    quiet: bool = False,
) -> Answer:
    """Evaluate a run, or a folder that `export` wrote, on a suite or on tasks.

    Each task is written to `out` (PATH/eval by default) as it finishes; one that is there with the same settings is
    not run again. HumanEval executes what the model writes, which `allow_code` permits where the system can contain it,
    and "unisolated" anywhere.
    """
    loops, depth = _how_deep(loops, depth)
    path, names = Path(path), choose(suite, tasks)
    _check(path, names, limit=limit, batch_size=batch_size, allow_code=allow_code)
    subject = open_subject(path, loops, depth)
    ours = TASKS.keys() | GRADED.keys()
    stock = [name for name in names if name not in ours]
    loaded = _load_tasks(stock, allow_code=bool(allow_code)) if stock else {}
    # A tag of lm-eval has become its tasks.
    names = [*loaded, *(name for name in names if name in ours)]
    out = RunDir(path).eval if out is None else Path(out)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        lm = _harness_model(subject, Path(folder), batch_size) if stock else None
        for index, name in enumerate(names, 1):
            progress = Progress(f"{name} ({index}/{len(names)})", batch=batch_size, show=not quiet)
            settings = _settings(name, subject, limit, loaded)
            files = Evaluation(out, name, limit=limit, loops=loops if depth is None else str(depth))
            found = files.read()
            if found is not None and found.get("settings") == settings:
                progress.say(f"{progress.title}: done before, in {files.result}")
                # A kill may have come between the result and the end of its answers.
                remove_answers(files)
                results[name] = found
                continue
            try:
                with progress:
                    results[name] = _run(name, subject, settings, lm, loaded.get(name), files, progress)
            except KeyboardInterrupt:
                progress.say(f"{progress.title}: stopped; the same command continues from here")
                raise
            except torch.OutOfMemoryError:
                raise ValueError(
                    f"{name} does not fit the memory in batches of {batch_size}; give a smaller --batch-size, which "
                    "continues from the answers so far"
                ) from None
            progress.say(f"{progress.title}: {_summary(results[name])}")
    table = scores({name: record["results"] for name, record in results.items()})
    answer = {
        "folder": str(out),
        "results": {name: record["results"] for name, record in results.items()},
        "scores": {name: {"value": value, "stderr": error} for name, (value, error) in table.items()},
        "averages": averages({name: value for name, (value, _) in table.items()}),
        "notes": [note for record in results.values() for note in record["notes"]],
    }
    return Answer(answer, head=["task", "metric", "value", "± stderr"], rows=list(_rows(answer["results"])))


def _rows(results: Mapping[str, Mapping[str, float]]) -> Iterator[list[str]]:
    """Every score beside its error."""
    for task, result in results.items():
        for metric, value in result.items():
            if "_stderr," not in metric:
                error = result.get(metric.replace(",", "_stderr,"))
                yield [task, metric, f"{value:.4f}", "" if error is None else f"{error:.4f}"]


def _check(path: Path, names: Sequence[str], *, limit: int | None, batch_size: int, allow_code: bool | str) -> None:
    """Refuse whatever can be known to be wrong before anything is loaded."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}; leave it out for the whole task")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if RunDir(path).latest() is None and not (path / "config.json").is_file():
        # Loading raises the error that says what the folder lacks.
        load(path)
    RunDir(path).check_links()
    code = [name for name in names if name in CODE]
    if code and not allow_code:
        raise ValueError(refusal(code))
    if allow_code is True:
        check_isolation()


def _load_tasks(names: Sequence[str], *, allow_code: bool) -> dict[str, Any]:
    reachable = offline.prepare()
    if allow_code:
        # The stock tasks try their metric, on a fixed program, as they are imported.
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    try:
        from . import harness
    except ImportError as error:
        raise ValueError(f"this needs lm-eval ({error}); pip install 'looptim[eval]'") from None
    try:
        return harness.load_tasks(names, allow_code=allow_code)
    except harness.MissingDataError as error:
        why = "could not be loaded" if reachable else "are not cached, and the hub is not reachable"
        raise ValueError(
            f"data sets that {why}: {error}; connect once to download them, or set HF_HOME to a folder "
            f"that has them (it is {offline.home()})"
        ) from None


def _run(
    name: str,
    subject: Subject,
    settings: dict[str, Any],
    lm: Model | None,
    loaded: Any,
    files: Evaluation,
    progress: Progress,
) -> dict[str, Any]:
    """Run one task and write its result."""
    record = {
        "task": name,
        "settings": settings,
        "batch_size": progress.batch,
        "device": device(),
        "versions": _versions(),
    }
    start = time.monotonic()
    with Answers(files, settings) as answers:
        if name in GRADED:
            number = settings["limit"] or reasoning.COUNT
            record |= graded.run(name, subject, settings, problems=number, progress=progress)
        elif lm is None or loaded is None:
            record |= reasoning.run(name, subject, settings, answers, batch_size=progress.batch, progress=progress)
        else:
            lm.start(answers, progress)
            record |= _run_stock(lm, name, loaded, settings, files)
        record["seconds"] = round(time.monotonic() - start, 3)
        files.write(files.result, record)
    remove_answers(files)
    return record


def _how_deep(loops: int | None, depth: Depth | None) -> tuple[int | None, Depth | None]:
    """Loops and depth as results know them: a fixed depth is a number of loops."""
    if loops is not None and depth is not None:
        raise ValueError(f"loops ({loops}) and depth ({depth}) both say how deep to go; give only one")
    return (depth.steps, None) if isinstance(depth, Fixed) else (loops, depth)


def _harness_model(subject: Subject, folder: Path, batch_size: int) -> Model:
    from . import harness

    if subject.folder is None:
        subject.tokenizer.save(folder)
    return harness.Model(subject.wrapped, subject.folder or folder, batch_size=batch_size)


def _settings(name: str, subject: Subject, limit: int | None, loaded: dict[str, Any]) -> dict[str, Any]:
    """What a result depends on. The batch size is not among it: numbers do not change with it."""
    settings = {"model": subject.identity, "limit": limit}
    if name in GRADED:
        settings |= graded.settings(name, subject.trained)
    elif name in TASKS:
        settings |= reasoning.settings(name, subject.trained)
    else:
        from . import harness

        settings |= {
            "num_fewshot": harness.num_fewshot(name, loaded[name]),
            "seeds": harness.SEEDS,
            "lm_eval": harness.VERSION,
            "task_versions": {part: task.VERSION for part, task in loaded[name]["tasks"].items()},
        }
    # The answers take the form they have when they come back from the disk.
    return json.loads(json.dumps(settings, default=str))


def _run_stock(lm: Model, name: str, loaded: Any, settings: dict[str, Any], files: Evaluation) -> dict[str, Any]:
    from . import harness

    metric = harness.isolate_code(name, loaded)
    with harness.quiet():
        answer = harness.run(lm, loaded, limit=settings["limit"])
    files.write(files.samples, _samples(answer["samples"]))
    numbers = {part: _numbers(result) for part, result in answer["results"].items()}
    return {
        # A group for which lm-eval has no mean has no result of its own; its parts have theirs.
        "results": numbers.pop(name, {}),
        "parts": numbers,
        "samples": {part: number["effective"] for part, number in answer["n-samples"].items()},
        "context": asdict(lm.cut),
        "sandbox": None if metric is None else metric.describe(),
        "notes": _notes(name, lm.cut, settings["model"]["context_length"], metric),
    }


def _notes(name: str, cut: Any, context: int, metric: Any) -> list[str]:
    notes = []
    if cut.cut:
        notes.append(
            f"{name}: {cut.cut} of {cut.requests} requests do not fit the context of {context} tokens "
            f"(the longest needs {cut.longest}) and lost the start of their prompt"
        )
    if cut.given:
        notes.append(f"{name}: generates at most {cut.given} tokens, not {cut.asked}, since the context is {context}")
    if metric is not None and (lacking := uncontained(metric.isolation or ())):
        notes.append(f"{name}: its programs were not contained, for want of {lacking}")
    return notes


def _numbers(result: dict[str, Any]) -> dict[str, Any]:
    """The metrics; lm-eval says N/A where it has no standard error."""
    return {key: value for key, value in result.items() if isinstance(value, int | float) and "," in key}


def _samples(samples: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the model answered, problem by problem."""
    kept = ("doc_id", "filter", "target", "resps", "filtered_resps", "prompt_hash")
    return [
        {"task": task, **{key: line[key] for key in kept}, **{key: line[key] for key in line["metrics"]}}
        for task, lines in samples.items()
        for line in lines
    ]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return versions


def _summary(record: dict[str, Any]) -> str:
    shown = [
        f"{key.removesuffix(',none')} {value:.4g}" for key, value in record["results"].items() if "stderr" not in key
    ]
    return "; ".join([", ".join(shown) + f", in {duration(record['seconds'])}", *record["notes"]])
