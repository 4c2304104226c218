from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wanshim.core.encoding import EncodingRequest
from wanshim.core.encoding import leader_lock as turns_module
from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.encoding.leader_lock import FileLock, sign
from wanshim.core.encoding.once import Encoded
from wanshim.core.encoding.request import KeyMaker, numerics
from wanshim.errors import RankAbsent, RanksFailed, WanshimError, WanshimWarning

MakeRequest = Callable[..., EncodingRequest]
Encode = Callable[[], dict[str, torch.Tensor]]
WAIT_S = 30.0


def calls(encode: Encode) -> int:
    return encode.calls  # type: ignore[attr-defined, no-any-return]


def test_encode_once_second_call_comes_from_the_cache(run: Callable[..., Encoded], encode: Encode) -> None:
    first, second = run(), run()
    assert (first.origin, second.origin, calls(encode)) == ("encoded", "cache", 1)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in ("embeds", "mask"))


def test_encode_once_on_a_hit_opens_no_encoder_file(
    run: Callable[..., Encoded], request_for: MakeRequest, count_opens: Callable[..., Any]
) -> None:
    counter = count_opens(request_for().sources[0].encoder.parent)
    run()
    assert sorted(counter.opened) == ["config.json", "config.json", "weights.bin", "weights.bin"]
    assert run().origin == "cache"
    assert counter.opened == []


def date_in_the_future(model: Path) -> Path:
    for path in model.rglob("*.*"):
        os.utime(path, (4e9, 4e9))
    return model


def touch(model: Path) -> Path:
    for path in model.rglob("*.*"):
        path.touch()
    return model


def move(model: Path) -> Path:
    return model.rename(model.with_name("moved"))


def copy(model: Path) -> Path:
    return Path(shutil.copytree(model, model.with_name("copied")))


def test_encode_once_of_files_dated_in_the_future_loads_the_encoder_once(
    run: Callable[..., Encoded], request_for: MakeRequest, encode: Encode, count_opens: Callable[..., Any]
) -> None:
    model = date_in_the_future(request_for().sources[0].encoder.parent)
    assert run().origin == "encoded"
    counter = count_opens(model)
    assert [run().origin for _ in range(3)] == ["cache"] * 3
    assert calls(encode) == 1
    assert counter.opened == []


@pytest.mark.parametrize("change", [date_in_the_future, touch, move, copy])
def test_encode_once_of_a_checkpoint_with_equal_content_keeps_its_embeddings(
    run: Callable[..., Encoded], request_for: MakeRequest, encode: Encode, change: Callable[[Path], Path]
) -> None:
    first = run()
    model = change(request_for().sources[0].encoder.parent)
    request = request_for(encoder=model / "text_encoder", tokenizer=model / "tokenizer")
    again = run(request=request)
    assert (again.origin, calls(encode)) == ("cache", 1)
    assert torch.equal(first.tensors["embeds"], again.tensors["embeds"])


def test_encode_once_another_prompt_is_encoded(
    run: Callable[..., Encoded], request_for: MakeRequest, encode: Encode
) -> None:
    run()
    assert run(request=request_for("sharp")).origin == "encoded"
    assert calls(encode) == 2


def test_encode_once_damaged_file_is_encoded_again(
    run: Callable[..., Encoded], encode: Encode, cache_dir: Path
) -> None:
    first = run()
    (path,) = cache_dir.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again = run()
    assert (again.origin, calls(encode)) == ("encoded", 2)
    assert torch.equal(first.tensors["embeds"], again.tensors["embeds"])


def test_encode_once_per_rank_uses_no_cache(run: Callable[..., Encoded], encode: Encode, cache_dir: Path) -> None:
    assert [run(mode="per_rank").origin for _ in range(2)] == ["per_rank", "per_rank"]
    assert calls(encode) == 2
    assert not cache_dir.exists()


def test_encode_once_leaves_random_state_and_gradients_alone(run: Callable[..., Encoded]) -> None:
    weight = torch.ones(3, requires_grad=True)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    enabled = []

    def encode() -> dict[str, torch.Tensor]:
        enabled.append(torch.is_grad_enabled())
        return {"embeds": torch.randn(3) * weight, "learned": weight}

    found = run(encode=encode)
    assert enabled == [False]
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(tensor.requires_grad for tensor in found.tensors.values())


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES], ids=["read-only", "not allowed"])
def test_encode_once_unwritable_cache_encodes_per_rank_with_one_warning(
    run: Callable[..., Encoded], encode: Encode, monkeypatch: pytest.MonkeyPatch, code: int, cache_dir: Path
) -> None:
    # Stands in for a read-only mount: the tests may run as root, whom no mode stops from writing.
    cache_dir.mkdir(mode=0o700)
    original = os.open

    def refuse(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return original(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(WanshimWarning, match="every rank encodes the prompt for itself") as seen:
        origins = [run().origin for _ in range(3)]
    assert origins == ["per_rank"] * 3
    assert calls(encode) == 3
    assert len(seen) == 1


def test_encode_once_read_only_cache_that_holds_the_prompt_is_used(
    run: Callable[..., Encoded], encode: Encode, read_only: Callable[[], None]
) -> None:
    run()
    read_only()
    assert run().origin == "cache"


def test_encode_once_disk_that_fills_up_keeps_the_result_and_warns_once(
    run: Callable[..., Encoded], encode: Encode, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    # Stands in for a full disk, which a test cannot make without a mount of its own.
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(WanshimWarning, match="No space left") as seen:
        results = [run() for _ in range(2)]
    assert len(seen) == 1
    assert torch.equal(results[0].tensors["embeds"], results[1].tensors["embeds"])
    assert not list(cache_dir.glob("*.safetensors")) + list(cache_dir.glob(".*.partial"))


def test_encode_once_world_writable_cache_is_refused(
    run: Callable[..., Encoded], encode: Encode, cache_dir: Path
) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    with pytest.raises(WanshimError, match="has mode 0777"):
        run()
    assert calls(encode) == 0


def test_encode_once_failure_reaches_its_caller_and_the_next_run_tries_again(
    run: Callable[..., Encoded], encode: Encode
) -> None:
    def fail() -> dict[str, torch.Tensor]:
        raise MemoryError("22.7 GB")

    with pytest.raises(MemoryError):
        run(encode=fail)
    assert run().origin == "encoded"


def test_encode_once_hands_the_tensors_out_on_the_device_that_was_asked_for(run: Callable[..., Encoded]) -> None:
    found = run(device="meta", encoder_device="cpu")
    assert all(tensor.is_meta for tensor in found.tensors.values())
    assert 0 < found.seconds < WAIT_S
    assert run().origin == "cache"  # the key is that of the device which computed


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [(None, "done", ""), (MemoryError("22.7 GB"), "failed", "MemoryError: 22.7 GB"),
     (KeyboardInterrupt(), "failed", "KeyboardInterrupt: ")],
    ids=["done", "failed", "interrupted"],
)  # fmt: skip
def test_encode_once_leaves_a_note_of_how_it_ended(
    run: Callable[..., Encoded], encode: Encode, request_for: MakeRequest, cache_dir: Path,
    error: BaseException | None, state: str, reason: str,
) -> None:  # fmt: skip
    def end() -> dict[str, torch.Tensor]:
        if error is not None:
            raise error
        return encode()

    with suppress(MemoryError, KeyboardInterrupt):
        run(encode=end)
    request = request_for()
    with CacheDirectory(cache_dir) as directory:
        turns = FileLock(directory, KeyMaker(request, numerics(torch.device("cpu")), request.folders()).turn)
        note = turns.last()
        turns.close()
    assert note is not None
    assert (note.state, note.reason) == (state, reason)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run `call` beside the test; a lock on another open file is another holder even in one process."""
    result: list[object] = []

    def target() -> None:
        try:
            result.append(call())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    return thread, result


class Refusals:
    """Counts the ranks that have found the turn taken."""

    def __init__(self) -> None:
        self._ranks: set[FileLock] = set()
        self._changed = threading.Condition()

    def add(self, rank: FileLock) -> None:
        with self._changed:
            self._ranks.add(rank)
            self._changed.notify_all()

    def wait(self, ranks: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._ranks) >= ranks, WAIT_S)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    refusals, claim = Refusals(), FileLock.claim

    def claim_and_say(self: FileLock) -> bool:
        got = claim(self)
        if not got:
            refusals.add(self)
        return got

    monkeypatch.setattr(FileLock, "claim", claim_and_say)
    return refusals


def leave(turn: FileLock, note: turns_module.Note, refused: Refusals) -> None:
    """Give the turn back with a note, once the waiter has asked for it."""
    refused.wait()
    turn.write(note)
    turn.release()


def test_encode_once_waiter_raises_the_encoding_ranks_error(
    run: Callable[..., Encoded], encode: Encode, turn: FileLock, refused: Refusals
) -> None:
    thread, result = in_thread(run)
    leave(turn, sign("failed", 5, "OutOfMemoryError: 22.7 GB"), refused)
    thread.join(WAIT_S)
    assert isinstance(result[0], RanksFailed)
    assert "rank 5" in str(result[0])
    assert "OutOfMemoryError: 22.7 GB" in str(result[0])
    assert calls(encode) == 0


def test_encode_once_every_rank_that_waited_raises_the_error(
    run: Callable[..., Encoded], encode: Encode, turn: FileLock, refused: Refusals
) -> None:
    ranks = [in_thread(run) for _ in range(3)]
    refused.wait(3)
    turn.write(sign("failed", 5, "OutOfMemoryError: 22.7 GB"))
    turn.release()
    for thread, _ in ranks:
        thread.join(WAIT_S)
    assert [type(result[0]) for _, result in ranks] == [RanksFailed] * 3
    assert calls(encode) == 0


def test_encode_once_after_a_killed_rank_encodes(
    run: Callable[..., Encoded], encode: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    rank = os.fork()
    if not rank:
        with suppress(BaseException):
            run(encode=lambda: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    _, status = os.waitpid(rank, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert run().origin == "encoded"
    assert f"process {rank} on" in caplog.text
    assert "takes over" in caplog.text


@pytest.mark.parametrize("ahead_s", [1e6, -1e6], ids=["longer uptime", "shorter uptime"])
def test_encode_once_failure_of_another_boot_does_not_refuse_the_next_start(
    run: Callable[..., Encoded], monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    def fail() -> dict[str, torch.Tensor]:
        raise MemoryError("22.7 GB")

    clock = time.monotonic
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock() + ahead_s)
        with pytest.raises(MemoryError):
            run(encode=fail)
    assert [run().origin for _ in range(2)] == ["encoded", "cache"]


def another_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(socket, "gethostname", lambda: "elsewhere")


def another_launcher(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "getppid", lambda: 1)


@pytest.mark.parametrize("from_another", [another_host, another_launcher])
@pytest.mark.parametrize("state", ["failed", "uncached"])
def test_encode_once_waiter_encodes_after_the_failure_of_another_host_or_job(
    run: Callable[..., Encoded],
    turn: FileLock,
    refused: Refusals,
    from_another: Callable[[pytest.MonkeyPatch], None],
    state: turns_module.State,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        from_another(patch)
        note = sign(state, 5, "OutOfMemoryError: 22.7 GB")
    thread, result = in_thread(run)
    leave(turn, note, refused)
    thread.join(WAIT_S)
    assert isinstance(result[0], Encoded)
    assert result[0].origin == "encoded"


@pytest.mark.parametrize("same_job", [True, False])
def test_encode_once_failure_counts_for_the_ranks_of_one_store(
    run: Callable[..., Encoded], refused: Refusals, same_job: bool
) -> None:
    encoding, failing = threading.Event(), threading.Event()

    def fail() -> dict[str, torch.Tensor]:
        encoding.set()
        assert failing.wait(WAIT_S)
        raise MemoryError("22.7 GB")

    mine = dist.HashStore()
    theirs = mine if same_job else dist.HashStore()
    leader, _ = in_thread(lambda: run(encode=fail, store=theirs))
    assert encoding.wait(WAIT_S)
    waiter, result = in_thread(lambda: run(store=mine))
    refused.wait()
    failing.set()
    leader.join(WAIT_S)
    waiter.join(WAIT_S)
    assert isinstance(result[0], RanksFailed if same_job else Encoded)


def test_encode_once_waiter_takes_over_from_a_dead_rank(
    run: Callable[..., Encoded], turn: FileLock, refused: Refusals, caplog: pytest.LogCaptureFixture
) -> None:
    thread, result = in_thread(run)
    refused.wait()
    turn.close()  # what the kernel does when the process dies
    thread.join(WAIT_S)
    assert isinstance(result[0], Encoded)
    assert result[0].origin == "encoded"
    assert "rank 5" in caplog.text
    assert "takes over" in caplog.text


def test_encode_once_waiter_gives_up_at_its_deadline_and_names_the_holder(
    run: Callable[..., Encoded], turn: FileLock
) -> None:
    with pytest.raises(RankAbsent, match=r"Rank 0 waited .* rank 5 .* has held the turn"):
        run(timeout_s=0.3)


def test_encode_once_deadline_blames_nobody_for_a_turn_whose_holder_left_no_word(
    run: Callable[..., Encoded], turn: FileLock
) -> None:
    turn.write(sign("failed", 5, "of yesterday"))
    with pytest.raises(RankAbsent, match="left no word") as caught:
        run(timeout_s=0.1)
    assert "rank 5" not in str(caught.value)


def test_encode_once_waiter_encodes_for_itself_where_nothing_can_be_kept(
    run: Callable[..., Encoded], encode: Encode, turn: FileLock, refused: Refusals
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thread, result = in_thread(run)
        leave(turn, sign("uncached", 5, "No space left on device"), refused)
        thread.join(WAIT_S)
    assert isinstance(result[0], Encoded)
    assert result[0].origin == "per_rank"


def test_encode_once_without_file_locks_takes_turns_in_the_store(
    run: Callable[..., Encoded], encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    store = dist.HashStore()
    others = [in_thread(lambda: run(store=store)) for _ in range(4)]
    for thread, _ in others:
        thread.join(20)
    found = sorted(result[0].origin for _, result in others if isinstance(result[0], Encoded))
    assert len(found) == 4
    assert found.count("encoded") == 1
    assert calls(encode) == 1


def test_encode_once_without_locks_or_store_encodes_per_rank(
    run: Callable[..., Encoded], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(WanshimWarning, match="no file locks"):
        assert run().origin == "per_rank"
