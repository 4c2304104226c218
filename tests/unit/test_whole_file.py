from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from wanshim.core.shared.files import written_whole


def test_file_takes_its_name_when_the_body_ends(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    target.write_text("old")
    with written_whole(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_body_that_fails_or_writes_nothing_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    target.write_text("old")

    def fail() -> None:
        with written_whole(target) as part:
            part.write_text("ha")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    with written_whole(target):
        pass
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_part_lies_where_nobody_else_can_enter_and_the_file_has_the_usual_mode(tmp_path: Path) -> None:
    target, before = tmp_path / "weights", os.umask(0o022)
    try:
        with written_whole(target) as part, written_whole(target) as other:
            assert part != other
            assert stat.S_IMODE(part.parent.stat().st_mode) == 0o700
            part.write_text("new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_content_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, flush, order = tmp_path / "weights", os.fsync, []

    def note(descriptor: int) -> None:
        order.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), target.exists()))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with written_whole(target) as part:
        part.write_text("new")
    assert order == [(False, False), (True, True)]


def test_folder_that_is_a_link_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "output").symlink_to(tmp_path / "disk")
    with written_whole(tmp_path / "output" / "weights") as part:
        part.write_text("new")
    assert (tmp_path / "disk" / "weights").read_text() == "new"


def test_killed_writer_leaves_the_old_file_and_one_hidden_folder(tmp_path: Path) -> None:
    target = tmp_path / "weights"
    target.write_text("old")
    writer = os.fork()
    if not writer:
        with written_whole(target) as part:
            part.write_text("ha")
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(writer, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert target.read_text() == "old"
    (left,) = [path for path in tmp_path.iterdir() if path != target]
    assert left.name.startswith(".weights.")
    assert left.name.endswith(".partial")
