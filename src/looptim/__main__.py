"""`looptim`, and `python -m looptim`, which is what torchrun starts."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line, in which Ctrl-C is one sentence from the first moment on."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        from looptim.cli import main

        main()
    except KeyboardInterrupt:
        _stop()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A KeyboardInterrupt, but not inside an import, which may make anything of it: there is nothing to save yet."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _stop()
        frame = frame.f_back
    raise KeyboardInterrupt


def _stop() -> None:
    os.write(2, b"looptim: stopped\n")
    os._exit(130)


if __name__ == "__main__":
    main()
