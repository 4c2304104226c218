"""Host memory that all ranks of a host see: a file without a name, which the others open among those of the first rank.

What passes between the ranks is the place of its descriptor in /proc; nothing is pickled. Nothing is left behind when
they have ended, whatever ends them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from wanshim.core.ranks.group import Group
from wanshim.core.shared.host_memory import UNNAMED, mapped, populate, room_for, unnamed_file
from wanshim.errors import RankAbsent, WanshimError

WAIT_S = 300.0  # for the slowest rank of the host
TOPIC = "wanshim/host memory"
_PURPOSE = "weights that the ranks of a host share"


class Shared:
    """Memory that all ranks of a host see, uint8 and flat. `leads`: this rank writes it, the others read.

    Args:
        writable: of the rank that leads: what is written here all ranks see, also where `memory` is private.
        topic: of the meetings of these ranks about this memory alone.
        call: in which they come, for messages.
    """

    def __init__(self, memory: torch.Tensor, writable: torch.Tensor | None, host: Group, topic: str, call: str) -> None:
        self.memory, self.writable, self.leads = memory, writable, writable is not None
        self._host, self._topic, self._call = host, topic, call

    def meet(self) -> None:
        """Wait until every rank of the host has come here.

        Raises:
            RankAbsent: a rank did not come in time; one that comes later raises at once.
            RanksFailed: a rank has failed.
        """
        try:
            self._host.gather(self._topic, None, WAIT_S, self._call)
        except RankAbsent as error:
            self.abandon(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one, now or later, that it will not come. Waits for nobody."""
        self._host.fail(self._topic, error)


def allocate(num_bytes: int, host: Group, call: str, *, private: bool = False) -> Shared:
    """Host memory, zero at first. All ranks of a host call this in the same order; ranks that cannot meet have each its
    own.

    Args:
        call: in which they come, for messages.
        private: what a rank writes to the memory, no other sees; the rank that leads has `writable` besides.

    Raises:
        HostMemoryInvalid: there is not that much room.
        RanksFailed: another rank of the host failed, or did not come.
        WanshimError: the memory cannot be opened, or the ranks ask for different sizes.
    """
    if host.store is None:
        with room_for(num_bytes, _PURPOSE):
            populate(memory := mapped(-1, num_bytes))
        return Shared(memory, memory, host, "", call)
    with ExitStack() as until_all_have_it:
        mine: dict[str, Any] = {"bytes": num_bytes}
        with host.failing_together(TOPIC, WAIT_S, call):
            if host.rank == 0:
                with room_for(num_bytes, _PURPOSE):
                    file = unnamed_file(num_bytes)
                    until_all_have_it.callback(os.close, file)
                    populate(memory := mapped(file, num_bytes))
                mine |= {"process": os.getpid(), "file": file, "inode": os.fstat(file).st_ino}
                mine["key"] = secrets.token_hex(8)
        offered = host.gather(TOPIC, mine, WAIT_S, call)
        topic = f"{TOPIC}/{offered[0]['key']}"
        try:
            if len(sizes := {offer["bytes"] for offer in offered}) > 1:
                raise WanshimError(
                    f"the ranks of this host share {' and '.join(map(str, sorted(sizes)))} bytes",
                    expected="the same number: the ranks load different models",
                )
            writable = None if host.rank else memory
            if host.rank:
                file = _opened(offered[0])
                until_all_have_it.callback(os.close, file)
            if private:  # each page that a rank writes is its own, and is fetched then
                memory = mapped(file, num_bytes, private=True)
            elif host.rank:
                populate(memory := mapped(file, num_bytes))
        except BaseException as error:
            host.fail(topic, error)
            raise
        shared = Shared(memory, writable, host, topic, call)
        shared.meet()
    return shared


def _opened(offer: Mapping[str, Any]) -> int:
    """Descriptor of the memory that the first rank offers."""
    expected = f"memory of user {os.getuid()}, and ranks in one process namespace"
    path = f"/proc/{int(offer['process'])}/fd/{int(offer['file'])}"
    try:
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        cannot = f"memory of the first rank of this host cannot be opened: {error}"
        raise WanshimError(cannot, expected=expected) from None
    found, name = os.fstat(file), str(Path(f"/proc/self/fd/{file}").readlink())
    is_offered = (found.st_ino, found.st_size) == (offer["inode"], offer["bytes"])
    if not is_offered or found.st_uid != os.getuid() or not name.startswith(f"/memfd:{UNNAMED}"):
        os.close(file)
        raise WanshimError(
            f"{path} is {name} of {found.st_size} bytes and user {found.st_uid}, not the memory of the first rank",
            expected=expected,
        )
    return file
