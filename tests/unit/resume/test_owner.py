"""A run has one owner: another process that would train it is named, and goes on."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from wanshim.core.resume.owner import own
from wanshim.undo import Undo


def test_second_owner_of_a_run_is_told_who_the_first_is_until_that_one_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Undo(), Undo()
    assert own(tmp_path, first)
    assert not caplog.records
    assert not own(tmp_path, second)
    said = f"process {os.getpid()} on {socket.gethostname()} trains this run too: {tmp_path}"
    assert [record.getMessage() for record in caplog.records] == [f"wanshim: {said}"]
    second.remove()
    assert not own(tmp_path, second), "who does not own it gives nothing back"
    first.remove()
    assert own(tmp_path, second)
    second.remove()


def test_folder_that_cannot_be_written_is_owned_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").touch()
    with Undo() as undo:
        assert own(tmp_path / "a file" / "run", undo)
    assert not caplog.records
