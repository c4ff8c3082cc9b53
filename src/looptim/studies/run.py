"""From a study's file to its folder of results: run the grid, then write tables, figures and the page."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from ..base.files import check_writable, claimed, write_whole
from ..config import Config
from ..loop.registry import NUMERICS
from ..recipe import find_file
from ..reporting.charts import samples_of
from ..reporting.page import Page, equations_of, write_report
from ..reporting.plots import render
from ..reporting.tables import FORMATS, Table
from ..reporting.template import PagePath
from ..rundir import difference
from . import phi_page
from .archive import ARCHIVE, pack, unpack
from .charts import charts, first_of, forests, groups, with_running
from .exits import exit_pictures, exit_tables
from .figures import FIGURES, draw
from .grid import is_settled, run_grid, sigterm_as_ctrl_c
from .hops import hop_heats, hop_pictures, hop_tables
from .measures import Comparison, Outcome, as_json, check_runs, compare, outcomes, running
from .spec import Plan, load_plan
from .statistics import student
from .tables import tables
from .tuning import FOLDER, choose, plan_trials, tuned

PAGE = "index.html"
Made = tuple[list[Table], Page, dict[str, bytes]]
"""Tables, the page, and files of figures and numbers."""


@sigterm_as_ctrl_c()
def study(
    path: str | Path,
    out: str | Path,
    *,
    scale: str | None = None,
    set: Iterable[str] = (),
    only: Iterable[str] = (),
    runs: str | Path | None = None,
    jobs: int = 1,
    progress: bool = True,
    watch: float | None = None,
) -> Path:
    """Run a study and write its table, figures and page into `out`; the page's path is returned.

    Finished runs are skipped and cut ones resumed. Runs go to `runs` (OUT/runs by default): studies that are given
    the same folder share the runs they have in common. `only` are patterns of the variants to take, such as "vanilla*";
    the reference comes with them, and the others can be added later. `jobs` of them are trained at a time; with 0 the
    table and the figures are made of the runs that are there. What finished runs logged is also kept in OUT/runs.zip,
    from which the study goes on where the runs themselves are gone. With `watch` the page is written about every so
    many seconds while runs train; one that is open in a browser follows by itself.
    """
    if jobs < 0:
        raise ValueError(f"jobs must be at least 1, or 0 to train nothing, got {jobs}")
    if watch is not None and (watch <= 0 or not jobs):
        raise ValueError(f"a page can follow runs that train, every few seconds; got watch {watch} with {jobs} jobs")
    path, out = find_file("studies", path), Path(out)
    plan = load_plan(path, scale=scale, set=set, only=only)
    folder = out / "runs" if runs is None else Path(runs)
    if plan.study.tune is not None:
        trials = plan_trials(path, plan, set=set)
        _carry_out(trials, out / FOLDER, folder, jobs=jobs, progress=progress, watch=watch)
        plan = tuned(path, plan, choose(plan.study, outcomes(trials, folder)), set=set)
    return _carry_out(plan, out, folder, jobs=jobs, progress=progress, watch=watch)


def _carry_out(plan: Plan, out: Path, folder: Path, *, jobs: int, progress: bool, watch: float | None) -> Path:
    changed = check_folder(out, plan)
    for place in (out, folder):
        check_writable(place)
    if progress:
        _introduce(plan)
        if watch is not None:
            print(f"{out / PAGE} follows the runs; open it in a browser", file=sys.stderr)
    unpack(plan, out / ARCHIVE, folder)
    if progress:
        _say_what_is_reused(plan, folder, changed)
    if jobs:
        check_runs(plan, folder, progress=progress)
    with claimed(out):
        write_whole(out / "study.json", json.dumps(plan.identity(), indent=2))
        try:
            if jobs:
                tick = _nothing if watch is None else _Watch(plan, folder, out, watch)
                run_grid(plan, folder, jobs=jobs, progress=progress, tick=tick)
        except KeyboardInterrupt:
            # The runs so far are worth seeing, and the tables say what is missing.
            write(plan, outcomes(plan, folder), folder, out)
            raise
        return write(plan, outcomes(plan, folder), folder, out)


def _introduce(plan: Plan) -> None:
    """Say what is compared, and how far the variants match."""
    for name in plan.study.variants:
        count = plan.counts[name]
        print(
            f"{name}: {count.name}, {sum(count.parameters.values()):,} parameters, "
            f"{plan.flops(name):.3f} of the training FLOPs of {plan.study.reference}",
            file=sys.stderr,
        )


def _say_what_is_reused(plan: Plan, folder: Path, changed: Sequence[str]) -> None:
    done: dict[str, int] = Counter(cell.variant for cell in plan.cells if is_settled(cell, folder))
    for name in plan.study.variants:
        if name in changed:
            print(f"{name}: its code has changed; what the old code trained is not used", file=sys.stderr)
        if done.get(name):
            print(f"{name}: {done[name]} of {len(plan.study.seeds)} runs are used again", file=sys.stderr)


def check_folder(out: Path, plan: Plan) -> list[str]:
    """A folder holds one study, which may gain seeds and variants; those whose code is another than before."""
    file = out / "study.json"
    if not file.is_file():
        return []
    now = plan.identity()
    try:
        before = json.loads(file.read_text())
        keys = [key for key in ("study", "reference") if before[key] != now[key]]
        keys += [key for key in ("vary", "held") if before.get(key) != now.get(key)]
        changed = [f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in keys]
        for name in now["variants"].keys() & before["variants"].keys():
            # Both are compared as configs: a key that looptim has gained since then has its default in both.
            both = (Config(**each["variants"][name]) for each in (before, now))
            changed += [f"variant {name}: {text}" for text in difference(*both)]
        version = before.get("numerics", 1) != NUMERICS
        old, new = (each.get("code", {}) for each in (before, now))
        recoded = [name for name in before["variants"] if version or old.get(name) != new.get(name)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} is damaged; delete it, and the runs that are there are used") from None
    if changed:
        raise ValueError(f"{out} holds another study ({'; '.join(sorted(changed)[:3])}); choose another --out")
    return recoded


def write(plan: Plan, found: Sequence[Outcome], runs: Path, out: Path) -> Path:
    """Tables, figures, the page and the archive of what is there."""
    made, page, files = _phi(plan, found, out) if plan.study.phi is not None else _differences(plan, found)
    for kind, form in FORMATS.items():
        files[f"results.{kind}"] = form(made).encode()
    files[ARCHIVE] = pack(plan, runs, out / ARCHIVE)
    files[PAGE] = page.html().encode()
    write_report(out, files, figures=FIGURES)
    return PagePath(out / PAGE)


@final
class _Watch:
    """Writes the page of a study, and it alone, when it is called and its time has come."""

    def __init__(self, plan: Plan, runs: Path, out: Path, seconds: float):
        self.plan, self.runs, self.out, self.seconds = plan, runs, out, seconds
        self.next = 0.0

    def __call__(self) -> None:
        start = time.monotonic()
        if start < self.next:
            return
        # What is wrong with a run is said when the study is through; it should not end the training of the others.
        with suppress(ValueError):
            page = with_running(self._now(), running(self.plan, self.runs), watch=self.seconds)
            write_report(self.out, {PAGE: page.html().encode()}, figures=())
        # A study of many runs takes long to read, and the runs need the processor.
        now = time.monotonic()
        self.next = now + max(self.seconds, 20 * (now - start))

    def _now(self) -> Page:
        found = outcomes(self.plan, self.runs)
        if self.plan.study.phi is not None:
            # A fit takes too long to be repeated while runs train.
            return _page(self.plan, [], [], [phi_page.table(self.plan, None, found)])
        compared = compare(self.plan, found)
        return _page(self.plan, found, compared, tables(self.plan, found, compared) + hop_tables(self.plan, found))


def _nothing() -> None:
    pass


def _differences(plan: Plan, found: Sequence[Outcome]) -> Made:
    """What a study says of its variants against the reference."""
    compared = compare(plan, found)
    made = tables(plan, found, compared) + hop_tables(plan, found) + exit_tables(found)
    _, files = render(lambda: draw(plan, found, compared) + hop_pictures(plan, found) + exit_pictures(found))
    files["results.json"] = (json.dumps(as_json(plan, found, compared), indent=2) + "\n").encode()
    return made, _page(plan, found, compared, made), files


def _phi(plan: Plan, found: Sequence[Outcome], out: Path) -> Made:
    """What it says of loops, where its variants are a grid for that."""
    measured = phi_page.measure(phi_page.points_of(plan, found), out / phi_page.FILE)
    _, files = render(lambda: [] if measured is None else [phi_page.picture(plan, measured)])
    if measured is not None:
        files[phi_page.FILE] = (json.dumps(measured) + "\n").encode()
    made = [phi_page.table(plan, measured, found)]
    page = dataclasses.replace(_page(plan, [], [], made), notes=["Made with", *_origins(found)])
    return made, page if measured is None else phi_page.with_exponents(page, plan, measured), files


def _page(plan: Plan, found: Sequence[Outcome], compared: Sequence[Comparison], made: Sequence[Table]) -> Page:
    done = [outcome for outcome in found if outcome.runs]
    return Page(
        title=plan.study.title,
        groups=groups(plan, done),
        charts=charts(plan, done),
        forests=forests(done, compared, plan.study.reference),
        heats=hop_heats(plan, done),
        tables=[dataclasses.replace(made[0], title="Results"), *made[1:]],
        equations=equations_of((name, plan.config(name)) for name in plan.study.variants),
        samples=[each for group, outcome in enumerate(done) for each in samples_of(group, first_of(outcome))],
        files={name: plan.config(name).to_toml() for name in plan.study.variants},
        notes=["Made with", *_origins(found)],
        student=student(max((len(outcome.runs) for outcome in done), default=0)),
    )


def _origins(found: Sequence[Outcome]) -> Iterator[str]:
    """A run is known by its config: that the code or the machine has changed between runs shows here."""
    records = [run.environment for outcome in found for run in outcome.runs.values()]
    if not records:
        return
    for key in ("looptim", "commit", "torch", "python", "platform", "device", "threads"):
        values = Counter(str(record.get(key)) for record in records)
        several = [f"{value} ({number} of {len(records)} runs)" for value, number in values.items()]
        yield f"{key}: {', '.join(several if len(values) > 1 else values)}"
