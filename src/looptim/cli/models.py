"""The verbs that run a model, or convert one."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .options import DepthOption, Loops, Run


def generate(
    run: Run,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads standard input.")],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after this many tokens. Default: 200, or as many as the model can hold."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample only from the K likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens whose probabilities add up to P."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed, to get the same text again.")] = None,
    loops: Loops = None,
    depth: DepthOption = None,
    draft_loops: Annotated[
        int | None, typer.Option(metavar="N", help="Generate the same text faster: draft it with the first N loops.")
    ] = None,
    show_depth: Annotated[bool, typer.Option("--show-depth", help="Print how many loops each new token ran.")] = False,
) -> None:
    """Continue a prompt, printing text as it is generated."""
    import torch

    import looptim

    from ..loop.depth import parse_depth

    # The verb's own function is asked for first, and so is the extra with all that it needs.
    continue_text = looptim.generate
    from ..loading import open_model

    model, tokenizer = open_model(run)
    if torch.cuda.is_available():
        model.cuda()
    prompt = sys.stdin.read() if prompt == "-" else prompt
    # The prompt is printed with the first piece of its continuation, so that an error has a line of its own.
    pieces = iter([prompt])
    took: list[int] = []
    continue_text(
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
        draft_loops=draft_loops,
        stream=lambda text: print(next(pieces, "") + text, end="", flush=True),
        on_depth=took.append if show_depth else None,
    )
    print()
    if took:
        print(f"loops of each new token: {' '.join(map(str, took))} (mean {sum(took) / len(took):.2f})")


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Output folder for model, config and tokenizer.")],
) -> None:
    """Export a run as a model folder that transformers loads."""
    import looptim

    print(looptim.export(run, folder))


def loop(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A decoder saved by transformers.")],
    layout: Annotated[str, typer.Option(help="Which layers to loop: 10-4x2-16 runs layers 11 to 14 of 30 twice.")],
    out: Annotated[str, typer.Option(metavar="DIR", help="Output folder for the looped model and its tokenizer.")],
    preset: Annotated[str, typer.Option(help="A transition listed by `looptim zoo`.")] = "operloop",
    set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set an option of the preset; may be repeated."),
    ] = None,
) -> None:
    """Loop some layers of a pretrained transformers model. Nothing is trained."""
    from ..hf.loop_model import loop_folder
    from ..recipe import parse_override

    options = {key: value for text in set or () for key, value in parse_override(text).items()}
    print(loop_folder(folder, out, layout=layout, preset=preset, options=options))


def serve(
    run: Run,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API. RUN is an exported or a looped model."""
    from ..hf.serving import serve

    serve(run, host=host, port=port)


def chat(
    run: Run,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.8,
) -> None:
    """Chat with a model in the terminal. RUN is an exported or a looped model; an empty line ends the chat."""
    from ..hf.serving import chat

    said = iter(lambda: input("> ") if sys.stdin.isatty() else sys.stdin.readline().strip(), "")
    chat(run, said, max_new_tokens=max_new_tokens, temperature=temperature)
