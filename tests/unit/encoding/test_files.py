from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wanshim.core.encoding import files
from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.encoding.files import content_digest, known_digest, scan
from wanshim.errors import EncodingInvalid


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "text_encoder"
    (path / "nested").mkdir(parents=True)
    (path / "a.safetensors").write_bytes(b"a" * 5_000_000)
    (path / "nested" / "b.json").write_text("{}")
    (path / ".gitattributes").write_text("hidden")
    return path


def test_scan_lists_visible_files_in_order(folder: Path) -> None:
    assert [stamp.name for stamp in scan(folder).stamps] == ["a.safetensors", "nested/b.json"]


@pytest.mark.parametrize("make", [True, False], ids=["empty", "missing"])
def test_scan_folder_without_files_is_refused(tmp_path: Path, make: bool) -> None:
    if make:
        (tmp_path / "none").mkdir()
    with pytest.raises(EncodingInvalid, match="holds no file"):
        scan(tmp_path / "none")


def test_digest_once_read_is_known_without_opening_a_file(
    folder: Path, directory: CacheDirectory, count_opens: Callable[..., Any]
) -> None:
    assert known_digest(scan(folder), directory) is None
    digest = content_digest(scan(folder), directory)
    counter = count_opens(folder)
    assert known_digest(scan(folder), directory) == digest
    assert counter.opened == []


def test_digest_of_a_copy_is_the_same(folder: Path, directory: CacheDirectory, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert content_digest(scan(copy), directory) == content_digest(scan(folder), directory)


def test_digest_of_edited_content_differs_even_with_size_and_time_kept(folder: Path, directory: CacheDirectory) -> None:
    digest = content_digest(scan(folder), directory)
    file = folder / "a.safetensors"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_bytes(b"b" + file.read_bytes()[1:])
    os.utime(file, ns=times)
    assert known_digest(scan(folder), directory) is None
    assert content_digest(scan(folder), directory) != digest


def test_digest_of_renamed_file_differs(folder: Path, directory: CacheDirectory) -> None:
    digest = content_digest(scan(folder), directory)
    (folder / "a.safetensors").rename(folder / "c.safetensors")
    assert content_digest(scan(folder), directory) != digest


def test_digest_note_that_was_edited_is_not_believed(folder: Path, directory: CacheDirectory, cache_dir: Path) -> None:
    content_digest(scan(folder), directory)
    (note,) = cache_dir.glob("*.files.json")
    digest = known_digest(scan(folder), directory)
    note.write_text(note.read_text().replace(str(digest), "0" * 64))
    assert known_digest(scan(folder), directory) is None
    assert not note.exists()


def test_digest_is_read_when_the_clock_of_the_file_system_has_moved_on(
    folder: Path, directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick a second change of a file shows in none of its times."""
    read_at = []
    original = files._sha256_file
    monkeypatch.setattr(files, "_sha256_file", lambda path: (read_at.append(time.monotonic()), original(path))[1])
    found = scan(folder)
    content_digest(found, directory)
    assert min(read_at) - found.scanned_at >= files._CLOCK_TICK_S


def test_digest_of_files_dated_in_the_future_is_known_afterwards(folder: Path, directory: CacheDirectory) -> None:
    future = time.time() + 86400
    os.utime(folder / "a.safetensors", (future, future))
    digest = content_digest(scan(folder), directory)
    assert known_digest(scan(folder), directory) == digest


def test_digest_is_known_after_the_clock_was_set_back(
    folder: Path, directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() - 86400)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 86400 * 10**9)
    digest = content_digest(scan(folder), directory)
    assert known_digest(scan(folder), directory) == digest


def test_digest_folder_that_changes_meanwhile_is_refused(folder: Path, directory: CacheDirectory) -> None:
    before = scan(folder)
    (folder / "a.safetensors").write_bytes(b"changed")
    with pytest.raises(EncodingInvalid, match="changed while"):
        content_digest(before, directory)
