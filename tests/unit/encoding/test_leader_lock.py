from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import torch.distributed as dist

from wanshim.core.encoding import leader_lock as turns_module
from wanshim.core.encoding.directory import CacheDirectory, CacheUnavailable
from wanshim.core.encoding.leader_lock import (
    FileLock,
    LeaderLock,
    LocksUnavailable,
    Note,
    StoreLock,
    job_name,
    sign,
)
from wanshim.core.shared import files
from wanshim.core.shared import processes as machine_module
from wanshim.core.shared.processes import machine

MakeTurns = Callable[[], LeaderLock]
Claims = Callable[[], tuple[Popen[str], dist.Store]]
CLAIM = """
import sys, time, torch.distributed as dist
from wanshim.core.encoding.leader_lock import StoreLock, sign
turns = StoreLock(dist.FileStore(sys.argv[1], -1), "prompt")
assert turns.claim()
turns.write(sign("encoding", 1))
print("claimed", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["file", "store"])
def make(request: pytest.FixtureRequest, directory: CacheDirectory) -> MakeTurns:
    if request.param == "file":
        return lambda: FileLock(directory, "prompt")
    store = dist.HashStore()
    return lambda: StoreLock(store, "prompt")


@pytest.fixture
def claims(tmp_path: Path) -> Iterator[Claims]:
    """A process that holds a turn of the returned store, and encodes."""
    started = []

    def start() -> tuple[Popen[str], dist.Store]:
        started.append(Popen([sys.executable, "-c", CLAIM, str(tmp_path / "store")], stdout=PIPE, text=True))
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "claimed\n"
        return started[0], dist.FileStore(str(tmp_path / "store"), -1)

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_turn_is_held_by_one_at_a_time(make: MakeTurns) -> None:
    first, second = make(), make()
    assert first.claim()
    assert not second.claim()
    first.release()
    assert second.claim()


def test_rank_that_waits_no_longer_ends_no_turn_of_another(make: MakeTurns) -> None:
    holder, waiter = make(), make()
    assert holder.claim()
    holder.write(sign("encoding", 5))
    assert not waiter.claim()
    waiter.release()
    waiter.close()
    assert not make().claim()
    note = holder.last()
    assert note is not None
    assert note.state == "encoding"


def test_note_that_replaces_another_is_the_last(make: MakeTurns) -> None:
    holder, waiter = make(), make()
    assert holder.claim()
    holder.write(sign("encoding", 5))
    assert not waiter.claim()
    holder.write(sign("failed", 5))
    note = waiter.last()
    assert note is not None
    assert note.state == "failed"


@pytest.mark.slow
def test_store_turn_of_a_process_that_lives_is_kept_though_it_stands_still(claims: Claims) -> None:
    other, store = claims()
    other.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED)
    assert not StoreLock(store, "prompt").claim()


def test_ranks_of_two_machines_take_turns_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    assert StoreLock(store, "prompt").claim()
    monkeypatch.setattr(turns_module, "machine", lambda: "elsewhere/1")
    assert StoreLock(store, "prompt").claim()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        *((code, LocksUnavailable) for code in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)),
        (errno.EIO, OSError),
    ],
    ids=["no locks", "not implemented", "not supported", "invalid", "a broken disk"],
)
def test_only_a_file_system_without_locks_counts_as_one(
    directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[Exception]
) -> None:
    def refuse(fd: int, operation: int) -> None:
        opened.append(fd)
        raise OSError(code, os.strerror(code))

    opened: list[int] = []
    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.raises(expected) as found:
        FileLock(directory, "prompt")
    assert type(found.value) is expected
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_note_that_the_disk_does_not_take_makes_the_cache_unavailable(
    directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    turns = FileLock(directory, "prompt")
    monkeypatch.setattr(turns_module.os, "pwrite", full)
    with pytest.raises(CacheUnavailable, match="cannot write the turn's note"):
        turns.write(sign("failed", 0))
    turns.close()


def test_turn_note_reaches_those_who_wait(make: MakeTurns) -> None:
    first, second = make(), make()
    first.claim()
    second.claim()
    first.write(sign("failed", 3, "no memory"))
    note = second.last()
    assert note is not None
    assert (note.state, note.rank, note.reason) == ("failed", 3, "no memory")


def test_turn_note_outlives_the_turn(make: MakeTurns) -> None:
    first, second = make(), make()
    first.claim()
    first.write(sign("failed", 3, "no memory"))
    first.release()
    assert second.claim()
    note = second.last()
    assert note is not None
    assert note.reason == "no memory"


def test_turn_note_too_long_is_cut_and_stays_readable(make: MakeTurns) -> None:
    first, second = make(), make()
    first.claim()
    first.write(sign("failed", 0, "\x1b色" * 5000))
    note = second.last()
    assert note is not None
    assert note.state == "failed"


def test_turn_note_that_just_fits_is_whole_and_the_next_longer_one_is_cut(directory: CacheDirectory) -> None:
    turns, note = FileLock(directory, "prompt"), sign("failed", 0)
    room = turns_module._NOTE_BYTES - len(json.dumps(asdict(note)))
    for length, kept in ((room, room), (room + 1, turns_module._NOTE_BYTES // 8)):
        turns.write(replace(note, reason="x" * length))
        found = turns.last()
        assert found is not None
        assert len(found.reason) == kept
    turns.close()


def test_turn_given_back_without_work_goes_to_the_next(make: MakeTurns) -> None:
    first, second, third = make(), make(), make()
    first.claim()
    first.release()
    assert second.claim()
    second.release()
    assert third.claim()


@pytest.mark.parametrize(
    ("note", "rank", "job"), [(None, -1, job_name()), (sign("encoding", 3, job="mine"), 3, "mine")]
)
def test_store_turn_given_back_without_an_end_says_who_left(note: Note | None, rank: int, job: str) -> None:
    store = dist.HashStore()
    turns = StoreLock(store, "prompt")
    assert turns.claim()
    if note is not None:
        turns.write(note)
    turns.close()
    left = StoreLock(store, "prompt").last()
    assert left is not None
    assert (left.state, left.rank, left.job) == ("left", rank, job)


@pytest.mark.slow
def test_store_turn_of_a_process_that_was_killed_is_taken_over(claims: Claims) -> None:
    other, store = claims()
    second = StoreLock(store, "prompt")
    assert not second.claim()
    other.kill()
    other.wait()
    assert second.claim()
    note = second.last()
    assert note is not None
    assert (note.state, note.rank, note.pid) == ("encoding", 1, other.pid)


def test_store_turn_of_a_process_that_cannot_be_seen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a container which shares the host's name and boot."""
    store = dist.HashStore()
    monkeypatch.setattr(turns_module, "process", lambda: "boot/pid:[1]/7/1")
    assert StoreLock(store, "prompt").claim()
    assert not StoreLock(store, "prompt").claim()


def test_turn_shows_who_comes_later_the_note_of_the_last_attempt_and_no_older_one(make: MakeTurns) -> None:
    for reason in ("first", "second"):
        turns = make()
        assert turns.claim()
        turns.write(sign("failed", 3, reason))
        turns.release()
    late = make()
    found = late.last()
    assert found is not None
    assert found.reason == "second"
    assert late.claim()
    assert late.last() == found


def test_note_names_rank_process_and_machine_of_its_writer() -> None:
    note = sign("failed", 3)
    assert note.who == f"rank 3 (process {os.getpid()} on {machine().partition('/')[0]})"
    assert note.job == f"children of process {os.getppid()}"


def test_two_notes_of_the_same_words_differ() -> None:
    assert sign("failed", 3, "no memory") != sign("failed", 3, "no memory")


def test_note_of_another_release_counts_for_none(directory: CacheDirectory, cache_dir: Path) -> None:
    turns = FileLock(directory, "prompt")
    for text in ('{"state": "failed", "rank": 3, "pid": 1, "host": "here", "at": 1e9}', "[]", "null", "\xff", ""):
        (cache_dir / "prompt.turn").write_bytes(text.encode("latin-1").ljust(4096))
        assert turns.last() is None
    turns.close()


STORES = {
    "hash": lambda folder: dist.HashStore(),
    "file": lambda folder: dist.FileStore(str(folder / "store"), 1),
    "tcp": lambda folder: dist.TCPStore("127.0.0.1", 0, 1, is_master=True),
    "prefix": lambda folder: dist.PrefixStore("worker/attempt_0", dist.HashStore()),
}


@pytest.mark.parametrize("make_store", STORES.values(), ids=STORES)
def test_job_of_one_store_has_one_name_and_another_store_another(
    tmp_path: Path, make_store: Callable[[Path], Any]
) -> None:
    store = make_store(tmp_path)
    assert job_name(store) == job_name(store)
    assert len({job_name(store), job_name(dist.HashStore()), job_name()}) == 3


def test_machine_of_another_boot_or_host_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine()
    assert here == machine()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        elsewhere = machine()
    monkeypatch.setattr(machine_module, "_boot_id", lambda: "another")
    assert len({here, elsewhere, machine()}) == 3


def test_turn_of_a_file_that_somebody_else_left_is_not_written_into(
    directory: CacheDirectory, cache_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "victim").write_text("keep")
    (cache_dir / "prompt.turn").symlink_to(tmp_path / "victim")
    turns = FileLock(directory, "prompt")
    assert turns.claim()
    turns.write(sign("encoding", 0))
    turns.close()
    assert (tmp_path / "victim").read_text() == "keep"
