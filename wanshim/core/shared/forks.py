"""State that a forked child must not use: a process group and its store, whose connections it shares with the parent;
threads, which it does not have; locks, which they may have held; streams of a CUDA context, which no fork survives.

A child that wants them makes its own: these functions refuse those of the parent, before anything waits for them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from wanshim.errors import WanshimError

_HINT = 'Start the child with the multiprocessing start method "spawn" or "forkserver"'

_inherited_group: Any = None  # the default group at the fork; one that the child makes itself is another object


def _remember_group() -> None:
    global _inherited_group
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        _inherited_group = dist.group.WORLD


os.register_at_fork(after_in_child=_remember_group)


def group_is_inherited() -> bool:
    """Was this process forked from the one that made the default process group?"""
    dist = sys.modules.get("torch.distributed")
    return _inherited_group is not None and dist is not None and dist.group.WORLD is _inherited_group


def refuse_inherited_group() -> None:
    """Call before using the default process group or its store.

    Raises:
        WanshimError: this process was forked from the one that made the group.
    """
    if group_is_inherited():
        raise WanshimError(
            f"process {os.getpid()} was forked from a rank, and its process group is that rank's", hint=_HINT
        )


class Owner:
    """The process that made an object. Keep one in the object, and check it before anything is used or waited for.

    Args:
        what: the object, for the message.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raise WanshimError in a child that was forked from the owner."""
        if not self.is_here:
            raise WanshimError(f"{self._what} of process {self.pid} is used in process {os.getpid()}", hint=_HINT)
