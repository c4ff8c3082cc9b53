"""The verbs that estimate or measure cost before anything is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ..base.console import print_json, print_table
from .options import Json, Recipe, Set


def count(
    recipe: Recipe,
    against: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Compare with this recipe and print the ratios.")
    ] = None,
    set: Set = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Sequence length. Default: the recipe's.")] = None,
    json: Json = False,
) -> None:
    """Count parameters, FLOPs and cache bytes. No memory is allocated for the model."""
    import looptim

    from ..model.count import (
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
        print_json({**ours.as_dict(), "ratios": ratios})
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


def plan(
    recipe: Recipe,
    gpus: Annotated[int, typer.Option(min=1, help="Total number of GPUs, over all nodes.")],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    set: Set = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            metavar="KEY=VALUE",
            help="Change an assumption about the GPU: memory, bf16, fp32, utilization, inside, ...",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Estimate memory, traffic and time on a GPU cluster. Every device mesh is simulated on this machine."""
    import looptim

    from ..training.plan_table import COLLECTIVES, COLUMNS, bars, cells, collective_cells, parse_gpu, verdict

    answer = looptim.plan(looptim.load_config(recipe, set=set or ()), gpus=gpus, nodes=nodes, gpu=parse_gpu(gpu or ()))
    if json:
        print_json(answer)
        return
    print(f"{recipe}: {answer['model']} on {gpus} GPUs, {nodes} nodes; times assume {answer['assumed']}")
    print_table(list(COLUMNS), [cells(mesh) for mesh in answer["meshes"]])
    print(bars(answer))
    print_table(list(COLLECTIVES), [row for mesh in answer["meshes"] for row in collective_cells(mesh)])
    print(verdict(answer))


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="PRESET", help="Transitions to measure. Default: one of each kind.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="Measure in this recipe's model. Default: four dense blocks of width 256, looped three times.",
        ),
    ] = None,
    set: Set = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of rounds; each round times every transition once.")] = 9,
    suite: Annotated[
        bool, typer.Option("--suite", help="Run the full benchmark suite, including peer libraries.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="GROUP", help="With --suite: transition, memory, decoding, ...; may be repeated."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="With --suite: fail if worse than this file, written by --update.")
    ] = None,
    update: Annotated[
        Path | None, typer.Option(help="With --suite: write what was measured into this file, a baseline.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure what a transition costs on this machine. Time, FLOPs and parameters are relative to the plain loop."""
    import looptim

    if suite or baseline or update or only:
        if not suite or names or recipe or set:
            raise ValueError(
                "--only, --baseline and --update go with --suite, which takes no PRESET, --recipe or --set; "
                "leave them out"
            )
        _bench_suite(only or (), repeats, baseline, update, json=json)
        return
    if set and not recipe:
        raise ValueError("--set changes a recipe; give --recipe too, such as --recipe nano")
    answer = looptim.bench(names or (), looptim.load_config(recipe, set=set or ()) if recipe else None, repeats=repeats)
    if json:
        print_json(answer)
        return
    print(f"{answer['model']}; {answer['device']}, {answer['threads']} threads")
    print(f"vanilla: {answer['seconds']:.3g} s for {answer['tokens']:,} tokens, forward + backward")
    print(f"MFU is of {answer['gemm_peak'] / 1e9:,.0f} GFLOP/s, a large matmul; all else is a ratio to vanilla")
    print_table(answer.head, answer.rows)


def _bench_suite(only: Iterable[str], repeats: int, baseline: Path | None, update: Path | None, *, json: bool) -> None:
    try:
        from ..hf import baseline as kept
        from ..hf.baseline import COLUMNS, as_json, processor, regressions
        from ..hf.bench import suite
    except ModuleNotFoundError as error:
        raise ValueError(f"--suite needs {error.name}; pip install 'looptim[hf]'") from None
    if baseline is not None:
        # A file that is no baseline is refused before anything is measured.
        kept.read(baseline)
    measures = suite(only, repeats=repeats)
    if update is not None:
        kept.update(update, measures)
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
