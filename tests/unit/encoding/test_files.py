from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

import pytest

from wanshim.core.encoding import files
from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.encoding.files import FileStamp, content_digest, known_digest, scan
from wanshim.errors import WanshimError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "text_encoder"
    (path / "nested").mkdir(parents=True)
    (path / "a.safetensors").write_bytes(b"a" * 5_000_000)
    (path / "nested" / "b.json").write_text("{}")
    (path / ".gitattributes").write_text("hidden")
    return path


def test_scan_lists_visible_files_in_order(folder: Path) -> None:
    (folder / "z.json").write_text("{}")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    assert [stamp.name for stamp in scan(folder).stamps] == ["a.safetensors", "nested/b.json", "z.json"]


def test_scan_describes_a_file_as_the_file_system_does(folder: Path) -> None:
    os.utime(folder / "a.safetensors", (1e9, 1e9))
    found = (folder / "a.safetensors").stat()
    stamp = ("a.safetensors", 5_000_000, 10**18, found.st_ctime_ns, found.st_ino)
    assert astuple(scan(folder).stamps[0]) == stamp


def test_scan_follows_the_links_of_a_download_cache(folder: Path, tmp_path: Path) -> None:
    """Its snapshots are folders of links to files, and may lie behind a link themselves."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "a.safetensors").symlink_to(folder / "a.safetensors")
    (snapshot / "nested").symlink_to(folder / "nested")
    assert scan(snapshot).stamps == scan(folder).stamps
    (tmp_path / "newest").symlink_to(snapshot)
    assert scan(tmp_path / "newest").token == scan(snapshot).token


@pytest.mark.parametrize("name", [field.name for field in fields(FileStamp)])
def test_token_changes_with_all_that_the_file_system_says_of_a_file(folder: Path, name: str) -> None:
    found = scan(folder)
    first, *others = found.stamps
    changed = replace(first, **{name: "other" if name == "name" else 1})
    assert replace(found, stamps=(changed, *others)).token != found.token


def test_token_changes_with_the_path(folder: Path) -> None:
    found = scan(folder)
    assert replace(found, path=folder.parent).token != found.token


@pytest.mark.parametrize("make", [True, False], ids=["empty", "missing"])
def test_scan_folder_without_files_is_refused(tmp_path: Path, make: bool) -> None:
    if make:
        (tmp_path / "none").mkdir()
    with pytest.raises(WanshimError, match="holds no file"):
        scan(tmp_path / "none")


@pytest.mark.parametrize("link", [True, False], ids=["device", "pipe"])
def test_scan_of_what_could_be_read_for_ever_is_refused(folder: Path, link: bool) -> None:
    path = folder / "c.safetensors"
    if link:
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    with pytest.raises(WanshimError, match=r"c\.safetensors' is no regular file"):
        scan(folder)


def test_pipe_that_took_the_place_of_a_file_is_not_waited_for(folder: Path, directory: CacheDirectory) -> None:
    found = scan(folder)
    (folder / "a.safetensors").unlink()
    os.mkfifo(folder / "a.safetensors")
    with pytest.raises(WanshimError, match=r"a\.safetensors' is no regular file"):
        content_digest(found, directory)


def test_scan_of_a_link_to_a_file_that_was_removed_is_refused(folder: Path) -> None:
    (folder / "c.safetensors").symlink_to(folder / "gone")
    with pytest.raises(WanshimError, match=r"c\.safetensors' is missing, or is a link"):
        scan(folder)


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


@pytest.mark.parametrize("place", [0, -1], ids=["first byte", "last byte"])
def test_digest_of_edited_content_differs_even_with_size_and_time_kept(
    folder: Path, directory: CacheDirectory, place: int
) -> None:
    digest = content_digest(scan(folder), directory)
    file = folder / "a.safetensors"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    content = bytearray(file.read_bytes())
    content[place] = ord("b")
    file.write_bytes(content)
    os.utime(file, ns=times)
    assert known_digest(scan(folder), directory) is None
    assert content_digest(scan(folder), directory) != digest


def test_digest_of_renamed_file_differs(folder: Path, directory: CacheDirectory) -> None:
    digest = content_digest(scan(folder), directory)
    (folder / "a.safetensors").rename(folder / "c.safetensors")
    assert content_digest(scan(folder), directory) != digest


def signed(**entry: str) -> bytes:
    return json.dumps({**entry, "sha256": files.sha256_json(entry)}).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: json.dumps({**entry, "digest": "0" * 64}).encode(),
        lambda entry: signed(digest="0" * 64, format="wanshim.files/0", path=entry["path"]),
        lambda entry: signed(digest="0" * 64, format=entry["format"], path="/elsewhere"),
        lambda entry: b"{}",
        lambda entry: b"[1]",
        lambda entry: b"null",
        lambda entry: b"half a no",
    ],
    ids=["edited", "another format", "another folder", "empty", "list", "nothing", "no JSON"],
)
def test_digest_note_that_is_not_right_is_set_aside_with_a_warning(
    change: Callable[[dict[str, str]], bytes],
    folder: Path,
    directory: CacheDirectory,
    cache_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    digest = content_digest(scan(folder), directory)
    (note,) = cache_dir.glob("*.files.json")
    note.write_bytes(change(json.loads(note.read_text())))
    assert known_digest(scan(folder), directory) is None
    assert not note.exists()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"reading {folder} again" in caplog.text
    assert content_digest(scan(folder), directory) == known_digest(scan(folder), directory) == digest


def test_digest_is_found_on_a_full_disk(
    folder: Path, directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    expected = content_digest(scan(folder), directory)
    monkeypatch.setattr(os, "fsync", full)
    assert content_digest(scan(folder), directory) == expected


def test_part_of_a_note_that_a_killed_writer_left_is_removed(
    folder: Path, directory: CacheDirectory, cache_dir: Path
) -> None:
    part = cache_dir / f".{scan(folder).token}.files.json.0.partial"
    part.mkdir()
    content_digest(scan(folder), directory)
    assert not part.exists()


def test_digest_is_read_when_the_clock_of_the_file_system_has_moved_on(
    folder: Path, directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick a second change of a file shows in none of its times."""
    read_at = []
    original = files._sha256_file
    monkeypatch.setattr(files, "_sha256_file", lambda path: (read_at.append(time.monotonic()), original(path))[1])
    found = scan(folder)
    content_digest(found, directory)
    assert min(read_at) - found.scanned_at >= 0.02  # of Linux 1 to 10 ms; of a network's servers more


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
    with pytest.raises(WanshimError, match="changed while"):
        content_digest(before, directory)
