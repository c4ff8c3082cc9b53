"""The entry point of `looptim` and of `python -m looptim`, which is what torchrun starts."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line. Ctrl-C ends it with one sentence from the very first moment."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        from looptim.cli import main

        main()
    except KeyboardInterrupt:
        _stop()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, except inside an import, which might swallow it; nothing needs saving yet."""
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
