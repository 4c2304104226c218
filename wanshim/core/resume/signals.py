"""Signals that ask a run to end: it saves a state first."""

from __future__ import annotations

import os
import signal
import threading
from functools import cache, partial
from multiprocessing import active_children
from multiprocessing.util import Finalize

from wanshim.core.shared.processes import ignores
from wanshim.undo import Undo

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class AskedToEnd:
    """Notes the signals until `undo` ends. A second ctrl-C interrupts at once; in a child each acts as it would."""

    def __init__(self, undo: Undo) -> None:
        self.by = 0  # the signal
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in ASKING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before = signal.signal(number, self._note)
                    undo.add(partial(signal.signal, number, before))

    def _note(self, number: int, frame: object) -> None:
        if os.getpid() != self._owner:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number == signal.SIGINT and self.by == number:
            raise KeyboardInterrupt
        self.by = number


def ignore_in_worker() -> None:
    """A worker of a data loader goes on until the process that it loads for ends it."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)


@cache
def end_workers_at_exit(loader: int) -> None:
    """Process `loader`, this one, ends the workers that `ignore_in_worker` keeps when it exits. The traceback of what
    ended it may hold their iterator; multiprocessing then sends them SIGTERM, and waits without a limit."""

    def end() -> None:
        for child in active_children():
            if ignores(child.pid or 0, signal.SIGTERM):
                child.kill()

    Finalize(None, end, exitpriority=0)  # before multiprocessing sends its signal
