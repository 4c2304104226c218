"""A NCCL process group for point-to-point traffic alone, whose failures never end the process that holds it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from wanshim.undo import Undo

# More than two rounds of the thread in which torch looks after NCCL's work. A group that is closed before that thread
# has seen its last work finish reports it as an error, though all data has come.
_WATCHDOG_SECONDS = 0.25
_ABORT_SECONDS = 2.0
_EXIT_SECONDS = 20.0
_one_at_a_time = threading.Lock()
# By the id of a group, which its thread, or its holder's finalizer, keeps alive.
_aborting: WeakValueDictionary[int, threading.Thread] = WeakValueDictionary()
_held: dict[int, weakref.finalize[Any, Any]] = {}
_of_parent: list[Any] = []  # groups whose deletion in a forked process would wait for threads that it has not
_starting = threading.RLock()  # a finalizer aborts another group wherever the interpreter collects what is unused
_INTERFACE = "NCCL_SOCKET_IFNAME"
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    patience: timedelta,
    holder: object,
    *,
    high_priority: bool = False,
    local: bool = False,
) -> Any:
    """The group, with all its ranks connected; every rank must call it.

    torch prints a warning of a group that is deleted open, so it is aborted with its holder, and with the interpreter.

    NCCL connects at the first traffic, waits for it without limit, and for every rank: so all send one value around,
    those that will have nothing to send too, in a thread that can be left behind.

    Args:
        holder: whoever uses the group until it is aborted.
        high_priority: its kernels start before those of other streams that wait for a free multiprocessor.
        local: all ranks are on this machine; their sockets listen on the loopback address.

    Raises:
        RuntimeError: NCCL failed, or not every rank came within `patience`.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    options._timeout = 5 * patience + timedelta(hours=1)  # our own waits end long before, unless a rank computes alone
    with _watchdog_that_only_watches():
        peers = dist.ProcessGroupNCCL(store, rank, size, options)
    failed: list[RuntimeError] = []

    def send_around() -> None:
        try:
            with _loopback(local), torch.cuda.device(device):
                value = torch.zeros(2, device=device)
                peers._start_coalescing()
                peers.send([value[:1]], (rank + 1) % size, 0)
                peers.recv([value[1:]], (rank - 1) % size, 0)
                peers._end_coalescing().wait()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=send_around, name="wanshim-connect", daemon=True)
    thread.start()
    thread.join(patience.total_seconds())
    if thread.is_alive():
        raise RuntimeError(f"not all ranks came within {patience.total_seconds():g} s")
    if failed:
        raise failed[0]
    _held[id(peers)] = weakref.finalize(holder, _abort_here, os.getpid(), peers)
    return peers


def _abort_here(pid: int, peers: Any) -> None:
    if pid == os.getpid():
        abort(peers, idle=True)
    else:
        _of_parent.append(peers)


def abort(peers: Any, *, idle: bool = False) -> threading.Thread:
    """Give a group of NCCL or gloo up, whatever its state: who waits in it wakes. Returns after 2 s at the latest.

    To free NCCL's memory CUDA waits for the kernels of all groups of this GPU, and those of another group may wait for
    the same lost rank until that group is aborted, too. So it goes on in a thread, which is returned. A second call
    for the group meanwhile waits for the same thread: who fails aborts it, and who wakes from that closes it. While the
    interpreter ends there is no thread, and it returns when all is done.

    Args:
        idle: it is NCCL's, and all its work has ended.
    """
    if idle:
        time.sleep(_WATCHDOG_SECONDS)
    if (held := _held.pop(id(peers), None)) is not None:
        held.detach()

    def leave() -> None:
        for name in ("abort", "shutdown"):  # not every release of torch has both
            with contextlib.suppress(Exception):
                getattr(peers, name)()

    with _starting:
        thread = _aborting.get(id(peers))
        started = thread is not None and thread.is_alive()
        if thread is None or not started:
            thread = _aborting[id(peers)] = threading.Thread(target=leave, name="wanshim-abort", daemon=True)
            started = _started(thread)
    if started:
        thread.join(_ABORT_SECONDS)
    else:
        leave()
    return thread


def _wait_for_aborts() -> None:
    """A thread still inside NCCL when the interpreter ends takes the process down with SIGABRT, even after a run
    that succeeded. On a GPU that others use, an abort takes longer than its caller waits."""
    end = time.monotonic() + _EXIT_SECONDS
    for thread in [ref() for ref in _aborting.valuerefs()]:
        if thread is not None and thread.is_alive():  # one that was refused a start is none to wait for
            thread.join(max(end - time.monotonic(), 0.0))


# At the exit, behind the finalizers that are made later: these abort groups too, and one may wait for another one.
weakref.finalize(_wait_for_aborts, _wait_for_aborts)


def _started(thread: threading.Thread) -> bool:
    """None starts while the interpreter ends. Python 3.12 refuses it as soon as it runs what `atexit` registered; in
    3.10 and 3.11 `start` would wait for ever after that."""
    with contextlib.suppress(RuntimeError):
        if not sys.is_finalizing():
            thread.start()
            return True
    return False


@contextlib.contextmanager
def _loopback(local: bool) -> Iterator[None]:
    """NCCL listens on the interface that a variable of the process names when it first connects, and keeps it: torch
    has no option for it. A process that is in a job of torch.distributed keeps the interface of that, which may lead to
    other machines, and what the user has chosen by a variable stays."""
    with Undo() as undo:
        if local and not dist.is_initialized():  # without "=" the name would be the beginning of one
            undo.set_variable(_INTERFACE, "=lo", unless=(_INTERFACE, "NCCL_SOCKET_FAMILY"))
        yield


@contextlib.contextmanager
def _watchdog_that_only_watches() -> Iterator[None]:
    """torch's watchdog ends the process when a peer fails; here that comes as `PeerLost` instead.

    The constructor of a group reads this from a variable of the process, and torch (2.15) has no option for it. So the
    variable is set while a group is constructed, which waits for no rank, and not while it connects; one thread at a
    time does so. A NCCL group that another thread of the user's constructs in these milliseconds works as any other,
    except that torch does not end the process when one of its ranks fails.
    """
    with _one_at_a_time, Undo() as undo:
        undo.set_variable(_ERROR_HANDLING, "0")
        yield
