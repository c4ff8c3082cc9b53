"""The command line: one plain function per verb, its docstring the help.

A verb reads arguments, calls the function of the API that has its name, and prints what that returned. Imports that
take long happen inside the verbs, so that `looptim --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ..base.console import clean, is_out_of_memory
from . import catalog, costs, models, results, training
from .options import StopError, takes_code

VERBS = {
    "demo": training.demo,
    "zoo": catalog.zoo,
    "diagnose": catalog.diagnose,
    "recipes": catalog.recipes,
    "config": catalog.config,
    "count": costs.count,
    "plan": costs.plan,
    "train": training.train,
    "generate": models.generate,
    "export": models.export,
    "loop": models.loop,
    "serve": models.serve,
    "chat": models.chat,
    "evaluate": results.evaluate,
    "report": results.report,
    "look": results.look,
    "study": training.study,
    "bench": costs.bench,
    "doctor": training.doctor,
}
"""The verbs in the order in which the help lists them."""

EXTRAS = {"chat": "hf", "doctor": "lm", "evaluate": "eval", "loop": "hf", "plan": "lm", "serve": "hf"}
"""The extra that a verb needs, for verbs that import more than a function of the API, which names its own extra."""

STOP_STATUS = 130
"""The exit status after Ctrl-C, as of a shell."""

app = typer.Typer(
    help="Loop transitions for looped transformers, written as optimizer steps.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _verb in VERBS.items():
    app.command(_name)(takes_code(_verb))


def _print_version(asked: bool) -> None:
    if asked:
        from .. import __version__

        print(f"looptim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


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
    except ModuleNotFoundError as error:
        verb = next((given for given in sys.argv[1:] if not given.startswith("-")), "")
        if verb not in EXTRAS or (error.name or "").startswith("looptim"):
            raise
        _fail(f"{verb} needs {error.name}; pip install 'looptim[{EXTRAS[verb]}]'")
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
