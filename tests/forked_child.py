"""What a plain fork of the test process comes to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

WAIT_S = 30


def in_forked_child(work: Callable[[], object]) -> str:
    """What `work` returns or raises in a child made by `os.fork`; a child that hangs is killed by its own alarm."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(WAIT_S)
        try:
            answer = str(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writable, answer.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        answer = file.read()
    _, status = os.waitpid(pid, 0)
    assert not os.WIFSIGNALED(status), f"the child hung and was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return answer
