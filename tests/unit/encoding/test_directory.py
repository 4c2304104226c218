from __future__ import annotations

import errno
import gc
import io
import os
import pwd
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wanshim.core.encoding.directory import CacheDirectory, CacheUnavailable, unavailable_on_oserror
from wanshim.core.shared import files
from wanshim.core.shared.files import Lock, NotOwn, prompt_cache
from wanshim.doctor.diagnosis import examine
from wanshim.errors import WanshimError
from wanshim.settings import Settings


def descriptors() -> int:
    """How many this process has open, without those of objects that other tests have left to the collector."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_directory_missing_is_made_private(cache_dir: Path) -> None:
    CacheDirectory(cache_dir).close()
    assert stat.S_IMODE(cache_dir.stat().st_mode) == 0o700


def test_directory_world_writable_is_refused(cache_dir: Path) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    with pytest.raises(WanshimError, match=r"mode 0777.*chmod 700 .*cache`, or name another directory"):
        CacheDirectory(cache_dir)


@pytest.mark.parametrize("below", ["cache", "models/cache"])
def test_directory_that_would_lie_in_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WanshimError, match=r"would lie in a file.*or name another directory"):
        CacheDirectory(tmp_path / "file" / below)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_directory_that_group_or_others_can_write_is_refused(cache_dir: Path, mode: int) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(mode)
    with pytest.raises(WanshimError, match=f"mode {mode:04o}"):
        CacheDirectory(cache_dir)


def test_directory_that_others_can_read_is_used(cache_dir: Path) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(0o755)
    CacheDirectory(cache_dir).close()


def test_directory_with_parents_that_are_missing_is_made_private_with_them(tmp_path: Path) -> None:
    CacheDirectory(tmp_path / "a" / "b" / "c").close()
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_directory_is_by_default_below_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prompt_cache() == tmp_path / ".cache" / "wanshim" / "encoding"


def test_directory_of_a_user_without_a_home_is_named_too_and_doctor_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number which /etc/passwd does not have."""

    def no_entry(*_: object) -> None:
        raise KeyError("no entry")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    assert prompt_cache() == Path("/nonexistent/.cache/wanshim/encoding")
    assert examine(Settings(), "none").prompt_cache == ""


def test_directory_symlink_in_its_place_is_refused(cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WanshimError, match=r"symbolic link.*Remove it, or name another directory"):
        CacheDirectory(cache_dir)


def test_directory_file_in_its_place_is_refused(cache_dir: Path) -> None:
    cache_dir.write_text("")
    with pytest.raises(WanshimError, match="not a directory"):
        CacheDirectory(cache_dir)


def test_directory_under_a_parent_anybody_can_rename_in_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(WanshimError, match=f"no sticky bit.*chmod o-w {parent}`"):
        CacheDirectory(parent / "cache")
    parent.chmod(0o1777)
    CacheDirectory(parent / "cache").close()


def test_directory_of_another_user_is_refused(cache_dir: Path, give_away: Callable[[Path], None]) -> None:
    cache_dir.mkdir(mode=0o700)
    give_away(cache_dir)
    before = descriptors()
    with pytest.raises(WanshimError, match="user 12345"):
        CacheDirectory(cache_dir)
    assert descriptors() == before


@pytest.fixture
def share_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Takes this process for another user in all that it opens, as a network share does with root."""
    fstat = os.fstat

    def take_for(uid: int) -> None:
        monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([*(f := fstat(fd))[:4], uid, *f[5:]]))

    return take_for


def test_directory_on_a_share_that_takes_this_user_for_another_is_used(
    cache_dir: Path, share_of: Callable[[int], None]
) -> None:
    share_of(65534)
    before = descriptors()
    with CacheDirectory(cache_dir) as directory:
        assert list(cache_dir.iterdir()) == []
        directory.write("entry", b"content")
        assert directory.read("entry") == b"content"
    assert descriptors() == before


def test_directory_of_another_user_on_a_read_only_share_is_refused(
    cache_dir: Path, share_of: Callable[[int], None], read_only: Callable[[], None]
) -> None:
    cache_dir.mkdir(mode=0o700)
    share_of(65534)
    read_only()
    with pytest.raises(WanshimError, match="user 65534"):
        CacheDirectory(cache_dir)


def test_directory_of_another_user_with_a_link_where_ownership_is_tried_out_is_refused(
    cache_dir: Path, tmp_path: Path, share_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir.mkdir(mode=0o700)
    share_of(65534)
    monkeypatch.setattr(files, "_unguessable", lambda start, end="": f"{start}guessed{end}")
    (cache_dir / ".owner.guessed").symlink_to(tmp_path / "victim")
    with pytest.raises(WanshimError, match="user 65534"):
        CacheDirectory(cache_dir)
    assert not (tmp_path / "victim").exists()


def test_directory_leaves_no_descriptor_open_and_may_be_closed_twice(cache_dir: Path) -> None:
    before = descriptors()
    cache_dir.mkdir(mode=0o777)
    cache_dir.chmod(0o777)
    with pytest.raises(WanshimError, match="has mode 0"):
        CacheDirectory(cache_dir)
    cache_dir.chmod(0o700)
    with CacheDirectory(cache_dir) as directory:
        directory.write("entry", b"content")
        directory.read("entry")
        (cache_dir / "entry").chmod(0o666)
        with pytest.raises(NotOwn):
            directory.read("entry")
        (cache_dir / "entry").unlink()
        os.mkfifo(cache_dir / "entry")
        with pytest.raises(NotOwn):
            directory.read("entry")
        (cache_dir / ".entry.00.partial").mkdir()
        directory.discard_parts("entry")
        directory.close()
    assert descriptors() == before


def test_error_that_is_no_refusal_of_the_file_system_passes_as_it_is() -> None:
    with pytest.raises(OSError, match="Invalid argument"), unavailable_on_oserror("cannot write"):
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("name", ["EACCES", "EDQUOT", "EIO", "ENOLCK", "ENOSPC", "EROFS", "ESTALE", "EPERM"])
def test_refusal_of_the_file_system_makes_the_cache_unavailable(name: str) -> None:
    code = getattr(errno, name)
    with pytest.raises(CacheUnavailable, match=os.strerror(code)), unavailable_on_oserror("cannot write"):
        raise OSError(code, os.strerror(code))


def test_directory_that_cannot_be_made_is_unavailable() -> None:
    with pytest.raises(CacheUnavailable, match="cannot make"):
        CacheDirectory(Path("/proc/wanshim/encoding"))


def test_write_leaves_one_private_file(directory: CacheDirectory, cache_dir: Path) -> None:
    directory.write("entry", b"content")
    assert [path.name for path in cache_dir.iterdir()] == ["entry"]
    assert stat.S_IMODE((cache_dir / "entry").stat().st_mode) == 0o600
    assert directory.read("entry") == b"content"


def test_write_brings_the_whole_file_to_the_disk_and_then_its_name(
    directory: CacheDirectory, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = [], os.fsync

    def note(fd: int) -> None:
        found = os.fstat(fd)
        synced.append((cache_dir / "entry").exists() if stat.S_ISDIR(found.st_mode) else found.st_size)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    directory.write("entry", b"content")
    assert synced == [len(b"content"), True]


def test_part_that_another_process_removed_before_it_was_locked_is_made_anew(
    directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Lock.take

    def removed_first(lock: Lock) -> bool | None:
        monkeypatch.setattr(Lock, "take", take)
        directory.discard_parts("entry")
        return take(lock)

    monkeypatch.setattr(Lock, "take", removed_first)
    before = descriptors()
    directory.write("entry", b"content")
    assert directory.read("entry") == b"content"
    assert descriptors() == before


def test_write_that_fails_leaves_the_old_file(
    directory: CacheDirectory, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write("entry", b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheUnavailable, match="No space left"):
        directory.write("entry", b"new")
    assert [path.name for path in cache_dir.iterdir()] == ["entry"]
    assert directory.read("entry") == b"old"


def test_read_symlink_is_foreign(directory: CacheDirectory, cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (cache_dir / "entry").symlink_to(tmp_path / "secret")
    with pytest.raises(NotOwn):
        directory.read("entry")


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_read_writable_by_others_is_foreign(directory: CacheDirectory, cache_dir: Path, mode: int) -> None:
    directory.write("entry", b"content")
    (cache_dir / "entry").chmod(mode)
    with pytest.raises(match=f"{mode:04o}"):
        directory.read("entry")


def test_read_of_a_name_that_is_not_there_is_nothing(directory: CacheDirectory) -> None:
    assert directory.read("entry") is None


def test_read_file_that_cannot_be_opened_is_foreign(directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    directory.write("entry", b"content")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(match=r"cannot be opened \(Permission denied\)"):
        directory.read("entry")


def test_read_file_that_goes_away_on_a_share_meanwhile_is_foreign(
    directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write("entry", b"whole")

    class Stale(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "fdopen", Stale)
    with pytest.raises(NotOwn, match=r"cannot be read \(Stale file handle\)"):
        directory.read("entry")


def test_name_that_cannot_be_moved_is_left_in_place(
    directory: CacheDirectory, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert directory.set_aside("entry") is None
    (cache_dir / "entry").symlink_to("elsewhere")
    monkeypatch.setattr(directory, "set_aside", lambda name: None)
    with pytest.raises(CacheUnavailable, match="entry is a symbolic link"):
        directory.open_own("entry", os.O_RDWR)


def test_discarding_parts_leaves_every_other_name(directory: CacheDirectory, cache_dir: Path) -> None:
    others = [".entry.00", ".entrypartial", ".entry2.00.partial", "entry.00.partial", ".other.00.partial"]
    for name in (*others, ".entry.00.partial"):
        (cache_dir / name).mkdir()
        (cache_dir / name / "entry").touch()
    os.mkfifo(cache_dir / ".entry.pipe.partial")  # what no writer leaves is no folder
    (cache_dir / ".entry.file.partial").touch()
    (cache_dir / ".entry.link.partial").symlink_to("entry.00.partial")
    directory.discard_parts("entry")
    left = sorted(path.name for path in cache_dir.iterdir())
    assert left == sorted([*others, *(f".entry.{kind}.partial" for kind in ("pipe", "file", "link"))])
    assert [path.name for path in (cache_dir / "entry.00.partial").iterdir()] == ["entry"]


def test_discarding_parts_removes_nothing_where_the_file_system_has_no_locks(
    directory: CacheDirectory, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    (cache_dir / ".entry.00.partial").mkdir()
    directory.discard_parts("entry")
    assert [path.name for path in cache_dir.iterdir()] == [".entry.00.partial"]
    directory.write("entry", b"content")
    assert directory.read("entry") == b"content"


def test_read_file_of_another_user_is_foreign(
    directory: CacheDirectory, cache_dir: Path, give_away: Callable[[Path], None]
) -> None:
    """As where the folder once was open to others: whoever left the file chose the embeddings in it."""
    directory.write("entry", b"content")
    give_away(cache_dir / "entry")
    with pytest.raises(match="belongs to user 12345"):
        directory.read("entry")


def test_read_second_name_of_a_file_elsewhere_is_foreign(
    directory: CacheDirectory, cache_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").write_bytes(b"content")
    (tmp_path / "elsewhere").chmod(0o600)
    os.link(tmp_path / "elsewhere", cache_dir / "entry")
    with pytest.raises(match="another name"):
        directory.read("entry")


def test_read_named_pipe_is_foreign_and_does_not_block(directory: CacheDirectory, cache_dir: Path) -> None:
    os.mkfifo(cache_dir / "entry")
    with pytest.raises(match="regular"):
        directory.read("entry")


def test_directory_swapped_for_a_link_after_opening_is_not_followed(
    directory: CacheDirectory, cache_dir: Path, tmp_path: Path
) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    cache_dir.rename(tmp_path / "moved")
    cache_dir.symlink_to(trap)
    directory.write("entry", b"content")
    assert list(trap.iterdir()) == []
    assert (tmp_path / "moved" / "entry").read_bytes() == b"content"


@pytest.mark.parametrize(("module", "step"), [(os, "fsync"), (Path, "replace")])
def test_discarding_parts_leaves_a_file_that_is_being_written(
    directory: CacheDirectory, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str
) -> None:
    original, calls = getattr(module, step), []

    def discard_meanwhile(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        with CacheDirectory(cache_dir) as another:
            another.discard_parts("entry")
        original(*args, **kwargs)

    monkeypatch.setattr(module, step, discard_meanwhile)
    directory.write("entry", b"content")
    assert calls
    assert directory.read("entry") == b"content"


def test_discarding_parts_removes_that_of_a_killed_writer(directory: CacheDirectory, cache_dir: Path) -> None:
    writer = os.fork()
    if not writer:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        with CacheDirectory(cache_dir) as another:
            another.write("entry", b"content")
        os._exit(0)
    _, status = os.waitpid(writer, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [path.suffix for path in cache_dir.iterdir()] == [".partial"]
    directory.discard_parts("entry")
    assert list(cache_dir.iterdir()) == []


@pytest.mark.parametrize(
    "kind", ["link", "second name", "pipe", "socket", "folder", "writable by all", "another user's"]
)
def test_open_own_sets_aside_what_is_not_ours(
    directory: CacheDirectory, cache_dir: Path, tmp_path: Path, kind: str, give_away: Callable[[Path], None]
) -> None:
    victim, entry = tmp_path / "victim", cache_dir / "entry"
    victim.write_text("keep")
    {
        "link": lambda: entry.symlink_to(victim),
        "second name": lambda: os.link(victim, entry),
        "pipe": lambda: os.mkfifo(entry),
        "socket": lambda: socket.socket(socket.AF_UNIX).bind(str(entry)),
        "folder": lambda: entry.mkdir(),
        "writable by all": lambda: (entry.touch(), entry.chmod(0o666)),
        "another user's": lambda: (entry.touch(0o600), give_away(entry)),
    }[kind]()
    fd = directory.open_own("entry", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"ours")
    os.close(fd)
    assert directory.read("entry") == b"ours"
    assert victim.read_text() == "keep"
