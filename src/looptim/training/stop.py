"""Ctrl-C and SIGTERM: the current update is finished and saved, within a time that is known beforehand."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import Any, final

from .distributed import World

GRACE = 100.0
"""Seconds from SIGTERM that a run has to finish its update and checkpoint; whatever is unsaved then is lost."""


@final
class StopRequest:
    """Ctrl-C or SIGTERM lets the current update finish, so that what is saved is whole; a second Ctrl-C stops at once.

    A second SIGTERM is not treated as impatience, since schedulers signal all processes, and studies and torchrun pass
    signals on. A process that waits for a lost one notices no signal, so a separate thread ends it after `GRACE`.
    """

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.before: dict[int, Any] = {}
        self.over = threading.Event()
        self.deaf = False
        """Ignore SIGTERM from now on, because the process is ending by itself and has something to report first."""

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
            self.bell, bell = socket.socketpair()
            bell.setblocking(False)
            # The system writes the signal's number there, whatever the main thread is waiting for.
            self.wakeup, self.ringing = signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False), bell
            threading.Thread(target=self._watch, args=(self.bell,), daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.over.set()
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM and self.deaf else handler)
        if self.before:
            signal.set_wakeup_fd(self.wakeup)
            # This tells the thread that listens at the other end that it is over.
            self.ringing.close()

    def _ask(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in self.asked:
            raise KeyboardInterrupt
        self.asked.add(number)

    def _watch(self, bell: socket.socket) -> None:
        with bell:
            while heard := bell.recv(1):
                if heard[0] == signal.SIGTERM:
                    break
            if heard and not self.over.wait(GRACE):
                message = f"looptim: the current update did not end within {GRACE:g} s of SIGTERM and is not saved; "
                os.write(sys.stderr.fileno(), f"{message}--resume continues from the last checkpoint\n".encode())
                os._exit(1)

    def agreed(self, world: World) -> bool:
        """Whether any process was asked to stop; all of them must save the same step."""
        return world.any(bool(self.asked))
