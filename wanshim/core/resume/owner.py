"""Two processes that train one run: each would remove the other's states. A crashed run has no owner."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from wanshim.core.shared.files import Lock, NotOwn, OwnFolder
from wanshim.undo import Undo


def own(run: Path, undo: Undo) -> bool:
    """This process trains `run` until `undo` ends. If another one does, a warning names it, and the result is False. A
    file system may have no locks: then nothing is said."""
    with suppress(OSError, NotOwn):  # a state that cannot be written is told by itself
        with OwnFolder(run) as folder:
            found = folder.claim("owner")
        if not isinstance(found, Lock):
            logging.getLogger("wanshim").warning("wanshim: %s trains this run too: %s", found, run)
            return False
        undo.add(found.close)
    return True
