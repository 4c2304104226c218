"""Locks and temporary folders of this process: who has them, and what is left when it is gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.forked_child import in_forked_child
from wanshim.core.shared.files import Lock, OwnFolder, remove_abandoned, temporary_folder


def test_claimed_name_is_refused_with_its_holder_until_it_is_closed(tmp_path: Path) -> None:
    with OwnFolder(tmp_path) as folder:
        held = folder.claim("lock")
        assert isinstance(held, Lock)
        assert str(folder.claim("lock")).startswith(f"process {os.getpid()} on ")
        held.close()
        again = folder.claim("lock")
        assert isinstance(again, Lock)
        again.close()


def test_lock_ends_with_its_process_while_a_forked_child_lives(tmp_path: Path) -> None:
    with OwnFolder(tmp_path) as folder:
        held = folder.claim("lock")
        assert isinstance(held, Lock)
        ready, ask = os.pipe()
        child = os.fork()
        if not child:
            os.write(ask, b".")
            signal.pause()
        os.read(ready, 1)
        held.close()
        again = folder.claim("lock")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert isinstance(again, Lock)
        again.close()


def test_child_forked_while_a_lock_is_closed_keeps_the_file_that_has_its_number_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread closes the lock while another starts a program with pipes."""
    with OwnFolder(tmp_path) as folder:
        held = folder.claim("lock")
    assert isinstance(held, Lock)
    number, seen = held.file, []

    def close(file: int) -> None:
        monkeypatch.undo()
        os.close(file)
        with Path(os.devnull).open("rb") as another:
            os.dup2(another.fileno(), number)
        seen.append(in_forked_child(lambda: os.fstat(number).st_nlink))

    monkeypatch.setattr(os, "close", close)
    held.close()
    os.close(number)
    assert seen == ["1"]


def test_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Lock.take

    def removed_first(lock: Lock) -> bool | None:
        monkeypatch.setattr(Lock, "take", take)
        (tmp_path / "lock").unlink()
        return take(lock)

    monkeypatch.setattr(Lock, "take", removed_first)
    with OwnFolder(tmp_path) as folder:
        held = folder.claim("lock")
        assert isinstance(folder.claim("lock"), str)  # the lock is on the file that has the name
        assert isinstance(held, Lock)
        held.close()


def test_temporary_folder_is_removed_by_others_only_when_its_process_was_killed(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, "of-a-run-") as folder:
        remove_abandoned(folder)
        assert folder.exists()
    assert list(tmp_path.iterdir()) == []
    child = os.fork()
    if not child:
        with temporary_folder(tmp_path, "of-a-run-") as folder:
            (folder / "more").mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    remove_abandoned(left)
    assert list(tmp_path.iterdir()) == []
