"""The verbs that use a model, or make one out of another."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .options import DepthOption, Loops, Run


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
    loops: Loops = None,
    depth: DepthOption = None,
    show_depth: Annotated[bool, typer.Option("--show-depth", help="Print how many loops each new token took.")] = False,
) -> None:
    """Stream a continuation of a prompt."""
    import torch

    import looptim

    from ..loop.depth import parse_depth

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


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where the model, config and tokenizer go.")],
) -> None:
    """Write a run's last checkpoint as a folder that transformers loads."""
    import looptim

    print(looptim.export(run, folder))


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
    from ..hf.loop_model import loop_folder
    from ..recipe import parse_override

    options = {key: value for text in set or () for key, value in parse_override(text).items()}
    print(loop_folder(folder, out, layout=layout, preset=preset, options=options))


def serve(
    run: Run,
    host: Annotated[str, typer.Option(help="Where it listens.")] = "localhost",
    port: Annotated[int, typer.Option(help="And on which port.")] = 8000,
) -> None:
    """Answer requests in the words of OpenAI, such as POST /v1/completions, with an exported or a looped model."""
    from ..hf.serving import serve

    serve(run, host=host, port=port)


def chat(
    run: Run,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.8,
) -> None:
    """Talk to an exported or a looped model; an empty line, or the end of the input, ends it."""
    from ..hf.serving import chat

    said = iter(lambda: input("> ") if sys.stdin.isatty() else sys.stdin.readline().strip(), "")
    chat(run, said, max_new_tokens=max_new_tokens, temperature=temperature)
