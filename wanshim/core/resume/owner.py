"""Two processes that train one run: each would remove the other's states. A crashed run has no owner."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

from wanshim.core.shared.own_folder import NotOwn, open_file, open_folder
from wanshim.undo import Undo


def own(run: Path, undo: Undo) -> bool:
    """This process trains `run` until `undo` ends. If another one does, a warning names it, and the result is False.

    The lock is of the process, so that no child has it; it ends with the first descriptor of the file that this process
    closes. A file system may have none: then nothing is said.
    """
    with suppress(OSError, NotOwn):  # a state that cannot be written is told by itself
        folder = open_folder(run, 0o700)
        undo.add(partial(os.close, folder))
        file = open_file("owner", folder, os.O_RDWR | os.O_CREAT)
        undo.add(partial(os.close, file))
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX leaves the choice
            other = os.pread(file, 256, 0).decode(errors="replace") or "another process"
            logging.getLogger("wanshim").warning("wanshim: %s trains this run too: %s", other, run)
            return False
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return True
