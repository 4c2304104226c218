"""The variable that the constructor of a NCCL group reads: there for each thread that makes one, and gone after."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wanshim.core.ranks import nccl
from wanshim.core.ranks.group import Group, LocalStore

INTERFACE = "NCCL_SOCKET_IFNAME"


class Holder:
    """Whoever uses a group."""


@pytest.mark.parametrize("before", [None, "3"])
def test_two_threads_that_make_a_group_each_find_the_variable_and_leave_it_as_it_was(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nccl._ERROR_HANDLING, raising=False)
    if before is not None:
        monkeypatch.setenv(nccl._ERROR_HANDLING, before)
    first_is_in, seen = threading.Event(), []

    def second() -> None:
        first_is_in.wait()
        with nccl._watchdog_that_only_watches():
            first.join()
            seen.append(os.environ.get(nccl._ERROR_HANDLING))

    def make_first() -> None:
        with nccl._watchdog_that_only_watches():
            first_is_in.set()
            other.join(0.2)  # it would come in between
            seen.append(os.environ.get(nccl._ERROR_HANDLING))

    first, other = threading.Thread(target=make_first), threading.Thread(target=second)
    other.start()
    first.start()
    other.join()
    assert seen == ["0", "0"]
    assert os.environ.get(nccl._ERROR_HANDLING) == before


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The variables that a group finds at each moment. A double of the group: NCCL has no CPU."""
    found: dict[str, str | None] = {}

    class Group:
        Options = staticmethod(lambda **_: Group())

        def __init__(self, *arguments: Any) -> None:
            if arguments:
                found["constructor"] = os.environ.get(nccl._ERROR_HANDLING)

        def abort(self) -> None:
            found["aborts"] = found.get("aborts", "") + "|"

        shutdown = _set_default_timeout = lambda self, *_: None

        def send(self, *_: Any) -> None:
            found["connecting"] = os.environ.get(nccl._ERROR_HANDLING)
            found["interface"] = os.environ.get(INTERFACE)

        recv = _start_coalescing = lambda self, *_: None
        _end_coalescing = wait = lambda self: self

    for name in (nccl._ERROR_HANDLING, INTERFACE, "NCCL_SOCKET_FAMILY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda size, device, made=torch.zeros: made(size))
    return found


def test_variable_is_there_while_a_group_is_constructed_and_not_while_it_connects(seen: dict[str, str | None]) -> None:
    holder = Holder()
    nccl.connect(dist.HashStore(), 0, 2, torch.device("cpu"), timedelta(seconds=5), holder)
    assert seen == {"constructor": "0", "connecting": None, "interface": None}


@pytest.mark.parametrize(
    ("own", "job", "interface"), [(None, False, "=lo"), ("eth0", False, "eth0"), (None, True, None)]
)
def test_group_of_one_machine_listens_on_the_loopback_interface_unless_the_process_has_another(
    own: str | None, job: bool, interface: str | None, seen: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if own is not None:
        monkeypatch.setenv(INTERFACE, own)
    monkeypatch.setattr(dist, "is_initialized", lambda: job)
    group = Group(range(2), 0, LocalStore(dist.HashStore()))
    group.connect("tensors", torch.device("cuda", 0), timedelta(seconds=5), group)
    assert seen["interface"] == interface
    assert os.environ.get(INTERFACE) == own  # a process that this one starts chooses for itself


def test_groups_of_one_gpu_are_aborted_though_the_first_waits_for_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles of the groups: NCCL, whose abort waits for the kernels of other groups, has no CPU."""
    monkeypatch.setattr(nccl, "_ABORT_SECONDS", 0.05)
    second_is_aborted, left = threading.Event(), []

    class First:
        def abort(self) -> None:
            second_is_aborted.wait(60)
            raise RuntimeError("of a group in any state")

        def shutdown(self) -> None:
            left.append("first")

    class Second:
        def abort(self) -> None:
            second_is_aborted.set()

        def shutdown(self) -> None:
            left.append("second")

    first = nccl.abort(First())
    assert not left
    nccl.abort(Second())
    first.join(60)
    assert sorted(left) == ["first", "second"]


def test_group_that_is_being_aborted_is_not_aborted_by_another_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch joins a group's threads in `shutdown`, which two at once must not do."""
    monkeypatch.setattr(nccl, "_ABORT_SECONDS", 0.05)
    may_end, calls = threading.Event(), []

    class Group:
        def abort(self) -> None:
            calls.append("abort")
            may_end.wait(60)

        def shutdown(self) -> None:
            calls.append("shutdown")

    group = Group()
    first = nccl.abort(group)
    assert nccl.abort(group) is first
    may_end.set()
    first.join(60)
    assert calls == ["abort", "shutdown"]
    nccl.abort(group).join(60)
    assert calls == 2 * ["abort", "shutdown"]


def test_group_of_a_torch_that_cannot_abort_it_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    left, failed = [], []
    monkeypatch.setattr(threading, "excepthook", failed.append)

    class Group:
        def shutdown(self) -> None:
            left.append(self)

    group = Group()
    nccl.abort(group).join(60)
    assert (left, failed) == ([group], [])


@pytest.mark.parametrize("ends", [True, False])
def test_exit_waits_for_an_abort_but_not_for_ever(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_ABORT_SECONDS", 0.05)
    monkeypatch.setattr(nccl, "_EXIT_SECONDS", 60.0 if ends else 0.05)
    may_end = threading.Event()

    class Group:
        def abort(self) -> None:
            may_end.wait(60)

        shutdown = abort

    thread = nccl.abort(Group())
    later = threading.Timer(0.2, may_end.set)
    if ends:
        later.start()
    nccl._wait_for_aborts()
    assert thread.is_alive() is not ends
    may_end.set()
    thread.join(60)


@pytest.mark.parametrize("closed", [False, True])
def test_group_is_aborted_once_with_its_holder(closed: bool, seen: dict[str, str | None]) -> None:
    """As torch reports one that is deleted open: a program's pipeline, its VAE and their connections may go at any
    time, and before the interpreter."""
    holder = Holder()
    group = nccl.connect(dist.HashStore(), 0, 2, torch.device("cpu"), timedelta(seconds=5), holder)
    if closed:
        nccl.abort(group)
    assert seen.get("aborts") == ("|" if closed else None)
    del holder
    gc.collect()
    assert seen["aborts"] == "|"


def test_group_of_another_process_is_left_alone(seen: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder()
    nccl.connect(dist.HashStore(), 0, 2, torch.device("cpu"), timedelta(seconds=5), holder)
    monkeypatch.setattr(os, "getpid", lambda: 0)  # as a child that was forked has another one
    del holder
    gc.collect()
    assert "aborts" not in seen


AT_EXIT = """
import atexit, torch
import torch.distributed as dist
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import patch
from wanshim.core.ranks import nccl

class Group:
    def __init__(self, name):
        self.name = name

    def abort(self):
        print(self.name, flush=True)

    def shutdown(self):
        pass

class Owner:
    def __del__(self, abort=nccl.abort, group=Group("deleted")):
        abort(group)

class Peers(Group):
    Options = staticmethod(lambda **_: Group("options"))

    def __init__(self, *_):
        self.name = "held"

    send = recv = _start_coalescing = lambda self, *_: None
    _end_coalescing = wait = lambda self: self

owner = Owner()
with patch.object(dist, "ProcessGroupNCCL", Peers), patch.object(torch.cuda, "device", lambda device: nullcontext()):
    kept = [nccl.connect(None, 0, 2, torch.device("cpu"), timedelta(seconds=5), owner)]
atexit.register(lambda: kept.append(nccl.abort(Group("registered"))))
"""


@pytest.mark.slow
def test_groups_are_aborted_while_the_interpreter_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout.split(), ended.stderr) == (["registered", "held", "deleted"], "")


SLOW = """
import sys, time, weakref
from wanshim.core.ranks import nccl

class Group:
    def abort(self):
        time.sleep(1)
        print("aborted", flush=True)

    def shutdown(self):
        pass

def leave():
    nccl.abort(Group())
    print("left", flush=True)

nccl._ABORT_SECONDS = 0.1
if sys.argv[1] == "finalizer":
    weakref.finalize(Group, leave)
else:
    leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["program", "finalizer"])
def test_interpreter_waits_for_an_abort_that_takes_longer_than_its_caller(by: str) -> None:
    """A double: it takes NCCL, and a GPU that is shared, for the interpreter to end within an abort with SIGABRT. One
    that a finalizer begins while the interpreter ends is waited for, too."""
    ended = subprocess.run([sys.executable, "-c", SLOW, by], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout.split(), ended.stderr) == (["left", "aborted"], "")
