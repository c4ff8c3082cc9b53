"""The command line: one plain function per verb, its docstring the help.

A verb reads arguments, calls the function of the API that has its name, and prints what that returned. Imports that
take long happen inside the verbs, so that `looptim --help` answers at once.
"""

from __future__ import annotations

import importlib.util
import json as json_module
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looptim.base.console import clean, is_out_of_memory, print_table

if TYPE_CHECKING:
    from looptim.config import Config

app = typer.Typer(
    help="Loop transitions for looped transformers, written as optimizer steps.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

STOP_STATUS = 130
"""The exit status after Ctrl-C, as of a shell."""


class StopError(Exception):
    """Ctrl-C, where there is more to say of it than that."""


Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Width = Annotated[int, typer.Option(help="Width d of the state.")]
Steps = Annotated[int, typer.Option(help="Number of loops R.")]


def _print_version(asked: bool) -> None:
    if asked:
        from looptim import __version__

        print(f"looptim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def demo(
    out: Annotated[str, typer.Option(metavar="DIR", help="Where the runs and pages go.")] = "runs/demo",
) -> None:
    """Show what looptim does, in a few minutes: a mismatch found, two models trained, a page that looks inside."""
    import looptim

    looptim.demo(out)


@app.command()
def zoo(
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    width: Width = 64,
    steps: Steps = 3,
) -> None:
    """Print every transition as an optimizer: the paper's comparison table, from the code, with the measured gap."""
    if json and markdown:
        raise ValueError("--json and --markdown exclude each other; give one")
    from looptim.loop import table

    rows = table.zoo(width, steps)
    if json:
        print(json_module.dumps(rows, indent=2, ensure_ascii=False))
    elif markdown:
        print(table.markdown(rows))
    else:
        if sys.stdout.isatty() and shutil.get_terminal_size().columns < 180:
            print(table.narrow(rows))
        else:
            print_table(list(table.COLUMNS.values()), [table.cells(row) for row in rows])
        print(table.FOOTNOTE)


@app.command()
def diagnose(
    name: Annotated[str, typer.Argument(metavar="PRESET", help="A transition's name, as `looptim zoo` lists them.")],
    json: Json = False,
    width: Width = 64,
    steps: Steps = 3,
) -> None:
    """Say whether a transition writes through the map it reads with, and what to do if it does not."""
    import dataclasses

    import looptim

    loop = looptim.build(name, width=width, steps=steps)
    verdict = looptim.diagnose(loop)
    if json:
        print(
            json_module.dumps({**dataclasses.asdict(verdict), "sentence": str(verdict)}, indent=2, ensure_ascii=False)
        )
    else:
        print(looptim.describe(loop))
        print(verdict)


@app.command()
def recipes(json: Json = False) -> None:
    """List the recipes and studies that come with looptim, by the names that other verbs take."""
    from looptim.recipe import shipped, summary

    kinds = {"recipes": "recipe", "studies": "study"}
    rows = [[kinds[kind], name, summary(path)] for kind in kinds for name, path in shipped(kind).items()]
    if json:
        print(json_module.dumps([dict(zip(("kind", "name", "summary"), row, strict=True)) for row in rows], indent=2))
    else:
        print_table(["kind", "name", "what it is"], rows)


def _complete_recipe(start: str) -> list[str]:
    from looptim.recipe import shipped

    return [name for name in shipped("recipes") if name.startswith(start)]


def _complete_study(start: str) -> list[str]:
    from looptim.recipe import shipped

    return [name for name in shipped("studies") if name.startswith(start)]


def _complete_key(start: str) -> list[str]:
    from looptim.recipe import keys

    return [f"{key.name}=" for key in keys() if key.name.startswith(start)]


Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A shipped recipe, such as nano, or a TOML file.", autocompletion=_complete_recipe
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the recipe; may be repeated.",
        autocompletion=_complete_key,
    ),
]


@app.command("config")
def config_(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="Print its values beside the defaults.", autocompletion=_complete_recipe),
    ] = None,
    set: Set = None,
    json: Json = False,
) -> None:
    """List every key of a recipe with its type, default and meaning, and with the value a recipe gives it."""
    from looptim.recipe import keys, load_config, values_of

    if set and recipe is None:
        raise ValueError("--set changes a recipe; give one too, such as nano")
    given = {} if recipe is None else values_of(load_config(recipe, set=set or ()))
    rows = [key._asdict() | ({} if recipe is None else {"value": given[key.name]}) for key in keys()]
    order = ["name", *([] if recipe is None else ["value"]), "default", "type", "meaning"]
    if json:
        print(json_module.dumps([{name: row[name] for name in order} for row in rows], indent=2, ensure_ascii=False))
    else:
        print_table(order, [[row[name] for name in order] for row in rows])


@app.command()
def count(
    recipe: Recipe,
    against: Annotated[str | None, typer.Option(metavar="RECIPE", help="Print ratios to another recipe.")] = None,
    set: Set = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Sequence length; the recipe's by default.")] = None,
    json: Json = False,
) -> None:
    """Count parameters, FLOPs and cache bytes by component, and as ratios to another recipe, without allocating."""
    import looptim
    from looptim.model.count import (
        COMPONENT_HEAD,
        CONVENTION_HEAD,
        component_cells,
        convention_cells,
        training_flops,
    )

    config = looptim.load_config(recipe, set=set or ())
    ours = looptim.count(config, seq_len=seq_len)
    other = looptim.count(looptim.load_config(against), seq_len=seq_len) if against else None
    if json:
        ratios = ours.ratios(other) if other else None
        print(json_module.dumps({**ours.as_dict(), "ratios": ratios}, indent=2, ensure_ascii=False))
        return
    print(f"{recipe}: {ours.name}, {ours.distinct_blocks} distinct blocks, depth {ours.depth}, {ours.seq_len} tokens")
    print_table(COMPONENT_HEAD, component_cells(ours))
    header = [*CONVENTION_HEAD, *([f"ratio to {against}"] if other else [])]
    print_table(header, convention_cells(ours, other))
    print(f"training FLOPs per token: {3 * sum(ours.flops.values()):,.0f} (three forward passes)")
    if config.train.loops.readouts:
        print(f"with {config.train.loops.readouts} earlier read-outs: {training_flops(config):,.0f}")
    print(f"KV cache: {ours.kv_bytes_per_token:,} bytes per token while no window is full (bf16, a slot per layer)")
    if config.data.mask_attention:
        print("attention scores are those of one document a sequence; data.mask_attention leaves fewer in training")


@app.command()
def plan(
    recipe: Recipe,
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs there will be, over all nodes.")],
    nodes: Annotated[int, typer.Option(min=1, help="On how many nodes they are.")] = 1,
    set: Set = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", metavar="KEY=VALUE", help="Assume another memory, bf16, fp32, utilization, inside, ..."),
    ] = None,
    json: Json = False,
) -> None:
    """Say what a training takes on GPUs that are not here: memory, traffic and time of an update, on every mesh."""
    import looptim
    from looptim.training.plan_table import COLLECTIVES, COLUMNS, bars, cells, collective_cells, parse_gpu, verdict

    answer = looptim.plan(looptim.load_config(recipe, set=set or ()), gpus=gpus, nodes=nodes, gpu=parse_gpu(gpu or ()))
    if json:
        print(json_module.dumps(answer, indent=2, ensure_ascii=False))
        return
    print(f"{recipe}: {answer['model']} on {gpus} GPUs, {nodes} nodes; times assume {answer['assumed']}")
    print_table(list(COLUMNS), [cells(mesh) for mesh in answer["meshes"]])
    print(bars(answer))
    print_table(list(COLLECTIVES), [row for mesh in answer["meshes"] for row in collective_cells(mesh)])
    print(verdict(answer))


@app.command()
def train(
    recipe: Recipe,
    out: Annotated[str, typer.Option(metavar="DIR", help="The run directory.")],
    set: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last complete checkpoint.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Resume although the config has changed.")] = False,
    export: Annotated[bool, typer.Option(help="Write DIR/model for transformers at the end.")] = True,
) -> None:
    """Train the model of a recipe, under torchrun on many processes, and export it for transformers."""
    import looptim
    from looptim.training.distributed import ElsewhereError

    # A missing package is reported now, not when the training is over.
    if export and importlib.util.find_spec("transformers") is None:
        raise ValueError("the export at the end needs transformers; pip install 'looptim[hf]', or give --no-export")

    try:
        run = looptim.train(_load_once(recipe, set or ()), out, resume=resume, force=force)
    except KeyboardInterrupt:
        raise StopError(f"stopped; the same command with --resume continues {out}") from None
    except ElsewhereError:
        # The process that failed has printed the reason.
        raise typer.Exit(2) from None
    if export and os.environ.get("RANK", "0") == "0":
        print(f"{run}: trained; {looptim.export(run)} loads in transformers")


def _load_once(recipe: str, set: list[str] | tuple[str, ...]) -> Config:
    """The config of a recipe; of many processes the first says what is wrong with it, and the others stop."""
    from looptim.recipe import load_config

    if "RANK" in os.environ:
        from looptim.training import distributed

        distributed.start().first_does(lambda: load_config(recipe, set=set))
    return load_config(recipe, set=set)


Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a folder `looptim export` wrote.")]


DepthOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIGNAL:THRESHOLD", help="Let tokens leave the loop, as in residual:0.05[:MINIMUM[:MAXIMUM]]."
    ),
]


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many tokens; by default 200, or what the model can hold.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the K likeliest tokens only.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens whose probabilities add up to P."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling, for text that can be repeated.")] = None,
    loops: Annotated[
        int | None, typer.Option(min=1, help="Run this many loops instead of the layout's; needs a shared transition.")
    ] = None,
    depth: DepthOption = None,
    show_depth: Annotated[bool, typer.Option("--show-depth", help="Print how many loops each new token took.")] = False,
) -> None:
    """Stream a continuation of a prompt."""
    import torch

    import looptim
    from looptim.loop.depth import parse_depth

    model, tokenizer = looptim.load(run)
    if torch.cuda.is_available():
        model.cuda()
    prompt = sys.stdin.read() if prompt == "-" else prompt
    # The prompt is printed with the first piece of its continuation, so that an error has a line of its own.
    pieces = iter([prompt])
    took: list[int] = []
    looptim.generate(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        loops=loops,
        depth=None if depth is None else parse_depth(depth),
        stream=lambda text: print(next(pieces, "") + text, end="", flush=True),
        on_depth=took.append if show_depth else None,
    )
    print()
    if took:
        print(f"loops of each new token: {' '.join(map(str, took))} (mean {sum(took) / len(took):.2f})")


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where the model, config and tokenizer go.")],
) -> None:
    """Write a run's last checkpoint as a folder that transformers loads."""
    import looptim

    print(looptim.export(run, folder))


@app.command()
def loop(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A decoder as transformers saves it.")],
    layout: Annotated[str, typer.Option(help="Which layers are looped, such as 10-4x2-16 of 30.")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Where the looped model and its tokenizer go.")],
    preset: Annotated[str, typer.Option(help="The transition, as `looptim zoo` lists them.")] = "operloop",
    set: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the preset; may be repeated.")
    ] = None,
) -> None:
    """Put a transition around some layers of a model that transformers loads, without training."""
    from looptim.hf.loop_model import loop_folder
    from looptim.recipe import parse_override

    options = {key: value for text in set or () for key, value in parse_override(text).items()}
    print(loop_folder(folder, out, layout=layout, preset=preset, options=options))


@app.command()
def serve(
    run: Run,
    host: Annotated[str, typer.Option(help="Where it listens.")] = "localhost",
    port: Annotated[int, typer.Option(help="And on which port.")] = 8000,
) -> None:
    """Answer requests in the words of OpenAI, such as POST /v1/completions, with an exported or a looped model."""
    from looptim.hf.serving import serve

    serve(run, host=host, port=port)


@app.command()
def chat(
    run: Run,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.8,
) -> None:
    """Talk to an exported or a looped model; an empty line, or the end of the input, ends it."""
    from looptim.hf.serving import chat

    said = iter(lambda: input("> ") if sys.stdin.isatty() else sys.stdin.readline().strip(), "")
    chat(run, said, max_new_tokens=max_new_tokens, temperature=temperature)


@app.command()
def evaluate(
    run: Run,
    suite: Annotated[
        str | None, typer.Option(help="paper, commonsense, generation, ppl or reasoning.", metavar="NAME")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="Tasks of lm-eval; with --suite, those of its tasks to run.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Evaluate the first N problems of each task only.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward; results do not depend on it.")] = 16,
    loops: Annotated[
        int | None, typer.Option(min=1, help="Run this many loops instead of the layout's; needs a shared transition.")
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let HumanEval execute what the model writes; see docs/evaluation.md.")
    ] = False,
    unisolated: Annotated[
        bool, typer.Option("--unisolated", help="With --allow-code, execute it even where nothing can contain it.")
    ] = False,
    depth: DepthOption = None,
    exits: Annotated[
        bool, typer.Option("--exits", help="Choose thresholds at which tokens leave the loop, and report on them.")
    ] = False,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Where results go; RUN/eval by default.")] = None,
    json: Json = False,
) -> None:
    """Run the paper's benchmarks; each task is written as it finishes, and a rerun skips what is done."""
    import looptim
    from looptim.loop.depth import parse_depth
    from looptim.rundir import RunDir

    if exits:
        if suite or tasks or depth or loops:
            raise ValueError("--exits chooses depths on the run's own held-out text; leave the other options out")
        _evaluate_exits(run, out, json)
        return
    if unisolated and not allow_code:
        raise ValueError("--unisolated is about executing code; give --allow-code too")
    names = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    answer = looptim.evaluate(
        run,
        suite=suite,
        tasks=names,
        limit=limit,
        batch_size=batch_size,
        loops=loops,
        depth=None if depth is None else parse_depth(depth),
        allow_code="unisolated" if unisolated else allow_code,
        out=out,
    )
    if json:
        print(json_module.dumps(answer, indent=2, ensure_ascii=False))
        return
    _print_scores(answer)
    # A report is made of a run directory and finds results in its eval/ only.
    tables = out is None and RunDir(run).metrics.path.is_file()
    print(f"{answer['folder']}: written" + (f"; `looptim report {run}` makes the paper's tables" if tables else ""))


def _evaluate_exits(run: str, out: str | None, json: bool) -> None:
    """Choose exits, write the report beside the results, and print it."""
    from looptim.evaluation.exits import evaluate_exits
    from looptim.reporting.exits import report_exits

    record = evaluate_exits(run, out=out)
    page = report_exits([record], Path(record["file"]).parent)
    print(json_module.dumps(record, indent=2) if json else page.with_name("exits.md").read_text(encoding="utf-8"))
    print(page)


def _print_scores(answer: dict) -> None:
    """The scores of an evaluation as a table, and their averages."""
    rows = [
        [task, metric, f"{value:.4f}", "" if error is None else f"{error:.4f}"]
        for task, result in answer["results"].items()
        for metric, value in result.items()
        if "_stderr," not in metric
        for error in [result.get(metric.replace(",", "_stderr,"))]
    ]
    print_table(["task", "metric", "value", "± stderr"], rows)
    means = {name: value for name, value in answer["averages"].items() if value is not None}
    if means:
        print(", ".join(f"{name} {value:.2f}" for name, value in means.items()))


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories.")],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the report goes; for one run, RUN/report by default.")
    ] = None,
    exits: Annotated[
        bool, typer.Option("--exits", help="Report on what `evaluate --exits` found, over runs and seeds.")
    ] = False,
) -> None:
    """Draw what runs did; print and write the paper's tables (Markdown, LaTeX, CSV) of those that were evaluated."""
    import looptim

    if exits:
        from looptim.reporting.exits import read_exits, report_exits

        if out is None:
            raise ValueError("a report on exits needs a folder; give --out")
        print(report_exits(read_exits(runs), out))
        return
    page = looptim.report(runs, out)
    tables = page.with_name("tables.md")
    if tables.is_file():
        print(tables.read_text(encoding="utf-8"))
    for path in (page, *(page.with_name(f"tables.{suffix}") for suffix in ("md", "tex", "csv"))):
        if path.is_file():
            print(path)


@app.command()
def look(
    run: Run,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model reads; - reads it from standard input.")],
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the page goes.")] = "look.html",
    against: Annotated[
        str | None, typer.Option(metavar="RUN", help="Another model with the same tokenizer, to stand beside it.")
    ] = None,
    loops: Annotated[
        int | None, typer.Option(min=1, help="Run this many loops instead of the layout's; needs a shared transition.")
    ] = None,
) -> None:
    """Show what a model would say after each loop, and how its state gets there, as one page for a browser."""
    import looptim

    text = sys.stdin.read() if text == "-" else text
    print(looptim.look(run, text, out=out, against=against, loops=loops).path)


@app.command()
def study(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A shipped study, such as main, or a TOML file.", autocompletion=_complete_study
        ),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Where the table, the figures and the page go.")],
    scale: Annotated[str | None, typer.Option(help="A size the file names, such as smoke.", metavar="NAME")] = None,
    set: Set = None,
    runs: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Where the runs go; studies given the same folder share runs. DIR/runs by default."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="How many runs are trained at the same time.")] = 1,
) -> None:
    """Compare transitions over seeds; finished runs are skipped, and the same command continues what was cut."""
    import looptim

    try:
        page = looptim.study(file, out, scale=scale, set=set or (), runs=runs, jobs=jobs)
    except KeyboardInterrupt:
        raise StopError(f"stopped; the same command continues {out}") from None
    print((page.parent / "results.md").read_text(encoding="utf-8"))
    print(page)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="PRESET", help="Transitions to measure; one of each kind by default.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="Measure in this recipe's model; by default in four dense blocks of width 256, looped three times.",
        ),
    ] = None,
    set: Set = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which all transitions take their turn.")] = 9,
    suite: Annotated[bool, typer.Option("--suite", help="Measure all that is watched, peers included.")] = False,
    baseline: Annotated[
        Path | None, typer.Option(help="With --suite: fail where this JSON of --suite --json was better.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure what a transition costs here: time, FLOPs and parameters of a training step over the vanilla loop's."""
    import looptim

    if suite or baseline:
        if not suite or names or recipe or set:
            raise ValueError("--baseline goes with --suite, which takes no PRESET, --recipe or --set; leave them out")
        _bench_suite(repeats, baseline, json=json)
        return
    from looptim.training.bench import COLUMNS, cells

    if set and not recipe:
        raise ValueError("--set changes a recipe; give --recipe too, such as --recipe nano")
    answer = looptim.bench(names or (), looptim.load_config(recipe, set=set or ()) if recipe else None, repeats=repeats)
    if json:
        print(json_module.dumps(answer, indent=2, ensure_ascii=False))
        return
    print(f"{answer['model']}; {answer['device']}, {answer['threads']} threads")
    print(f"vanilla: {answer['seconds']:.3g} s for {answer['tokens']:,} tokens, forward + backward")
    print(f"MFU is of {answer['gemm_peak'] / 1e9:,.0f} GFLOP/s, a large matmul; all else is a ratio to vanilla")
    print_table(list(COLUMNS), [cells(row) for row in answer["rows"]])


def _bench_suite(repeats: int, baseline: Path | None, *, json: bool) -> None:
    try:
        from looptim.hf.bench import COLUMNS, as_json, processor, regressions, suite
    except ModuleNotFoundError as error:
        raise ValueError(f"--suite needs {error.name}; pip install 'looptim[hf]'") from None
    measures = suite(repeats=repeats)
    if json:
        print(as_json(measures), end="")
    else:
        print(f"{processor()}; medians and quartiles of {repeats} rounds")
        print_table(list(COLUMNS), [measure.cells for measure in measures])
    if baseline is not None:
        worse = regressions(measures, baseline)
        if worse is None:
            print(f"{baseline} is of another kind of processor: nothing is compared", file=sys.stderr)
        elif worse:
            print("\n".join(["worse than the baseline:", *worse]), file=sys.stderr)
            raise typer.Exit(1)


def main() -> None:
    """Run the command line. What a user did wrong is one line on standard error and exit status 2."""
    try:
        # Without arguments typer would treat the help as an error.
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort, StopError) as stop:
        _stop(str(stop) if isinstance(stop, StopError) else "stopped")
    except BrokenPipeError:
        # The reader of the pipe has left, as `| head` does, and Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:
        _fail(str(error))
    except Exception as error:
        # The base class of typer's usage errors is not public, but the method that words them is.
        message = getattr(error, "format_message", None)
        if is_out_of_memory(error):
            _fail("the memory does not suffice; take a smaller model, fewer or shorter sequences, or another machine")
        if message is None:
            raise
        _fail(message())
    else:
        if status == STOP_STATUS:
            # Typer turns Ctrl-C into a number.
            _stop("stopped")
        sys.exit(status if isinstance(status, int) else 0)


def _stop(message: str) -> None:
    print(f"looptim: {message}", file=sys.stderr)
    sys.exit(STOP_STATUS)


def _fail(message: str) -> None:
    # A name in it may be anybody's, and must not steer the terminal.
    print(f"looptim: {clean(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(2)
