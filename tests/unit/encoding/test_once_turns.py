"""What a rank does in `encode_once` while another has the turn, and what it leaves when the turn was its own."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from wanshim.core.encoding import EncodingRequest, once
from wanshim.core.encoding.directory import CacheDirectory
from wanshim.core.encoding.leader_lock import FileLock, Note, job_name, sign
from wanshim.core.encoding.once import Encoded
from wanshim.core.encoding.request import KeyMaker, numerics
from wanshim.core.ranks import agreement
from wanshim.errors import RankAbsent, RanksFailed, WanshimError, WanshimWarning

CPU = torch.device("cpu")
MakeRequest = Callable[..., EncodingRequest]
Encode = Callable[[], dict[str, torch.Tensor]]
Run = Callable[..., Encoded]


@pytest.fixture
def rank_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is rank 3 of a job; its group, of one, can call collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_rank", lambda *group: 3)
    yield
    monkeypatch.undo()
    dist.destroy_process_group()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


def keys(request: EncodingRequest) -> KeyMaker:
    return KeyMaker(request, numerics(CPU), request.folders())


def last_note(request: EncodingRequest, cache_dir: Path) -> Note:
    with CacheDirectory(cache_dir) as directory:
        turns = FileLock(directory, keys(request).turn)
        note = turns.last()
        turns.close()
    assert note is not None
    return note


# --- while another has the turn


class Clock(SimpleNamespace):
    """Time in which only sleeping takes any: `steps` of it, after each of which `then` may happen."""

    def __init__(self, seconds_a_sleep: float) -> None:
        super().__init__()
        self.now, self.slept, self._step = 1000.0, [], seconds_a_sleep
        self.then: dict[int, Callable[[], object]] = {}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += self._step
        self.then.get(len(self.slept), lambda: None)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(10.0)
    monkeypatch.setattr(once, "time", clock)
    return clock


@pytest.mark.parametrize(("noted_after", "held"), [(None, 60), (2, 40)], ids=["all the time", "since 40 s"])
def test_deadline_names_the_rank_that_waited_its_holder_and_their_seconds(
    run: Run, turn: FileLock, clock: Clock, rank_3: None, noted_after: int | None, held: int
) -> None:
    if noted_after:
        clock.then[noted_after] = lambda: turn.write(sign("encoding", 6))
    holder = 6 if noted_after else 5
    expected = rf"Rank 3 waited 60 s .* rank {holder} .* has held the turn for at least {held} s"
    with pytest.raises(RankAbsent, match=expected):
        run(timeout_s=60.0)


def test_waiting_rank_looks_again_soon_and_sleeps_in_between(run: Run, turn: FileLock, clock: Clock) -> None:
    with pytest.raises(RankAbsent):
        run(timeout_s=60.0)
    assert len(clock.slept) == 6
    assert all(0.01 <= seconds <= 0.1 for seconds in clock.slept)


def test_waiting_rank_reads_no_file_of_the_encoder(
    run: Run, turn: FileLock, clock: Clock, request_for: MakeRequest, count_opens: Callable[..., Any]
) -> None:
    """A text encoder is 11 to 23 GB: the rank with the turn alone reads it."""
    counter = count_opens(request_for().sources[0].encoder.parent)
    with pytest.raises(RankAbsent):
        run(timeout_s=60.0)
    assert counter.opened == []


def test_rank_that_takes_over_names_itself_and_the_rank_that_stopped(
    run: Run, turn: FileLock, rank_3: None, caplog: pytest.LogCaptureFixture
) -> None:
    turn.close()  # what the kernel does when the process dies
    run()
    assert "rank 5" in caplog.text
    assert "rank 3 takes over" in caplog.text


@pytest.fixture
def found_later(run: Run, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> list[bool]:
    """The embeddings are in the cache as soon as this rank has asked for the turn; what it was answered is noted."""
    run()
    (file,) = cache_dir.glob("*.safetensors")
    aside, claim, answers = file.rename(cache_dir / "aside"), FileLock.claim, []

    def claim_and_find(self: FileLock) -> bool:
        answers.append(claim(self))
        if aside.exists():
            aside.rename(file)
        return answers[-1]

    monkeypatch.setattr(FileLock, "claim", claim_and_find)
    return answers


def test_waiting_rank_takes_what_appears_though_the_turn_stays_taken(
    found_later: list[bool], run: Run, encode: Any, request_for: MakeRequest, cache_dir: Path
) -> None:
    with (cache_dir / f"{keys(request_for()).turn}.turn").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run(timeout_s=5.0).origin == "waited"
    assert (found_later, encode.calls) == ([False], 1)


def test_rank_that_gets_the_turn_when_the_embeddings_are_there_encodes_nothing(
    found_later: list[bool], run: Run, encode: Any
) -> None:
    assert run().origin == "waited"
    assert (found_later, encode.calls) == ([True], 1)


def test_waiting_rank_raises_the_error_though_the_turn_stays_taken(
    run: Run, turn: FileLock, clock: Clock, encode: Any
) -> None:
    clock.then[1] = lambda: turn.write(sign("failed", 5, "MemoryError: 22.7 GB"))
    with pytest.raises(RanksFailed, match=r"22\.7 GB"):
        run(timeout_s=60.0)
    assert encode.calls == 0


@pytest.mark.parametrize("locks", [True, False], ids=["file locks", "store"])
def test_prompts_take_turns_of_their_own(
    locks: bool, run: Run, encode: Encode, request_for: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    store = dist.HashStore()

    def encode_another_meanwhile() -> dict[str, torch.Tensor]:
        assert run(request=request_for("sharp"), store=store, timeout_s=0.2).origin == "encoded"
        return encode()

    assert run(encode=encode_another_meanwhile, store=store).origin == "encoded"


@pytest.mark.parametrize("timeout_s", [5.0, 1800.0])
def test_rank_that_comes_late_is_waited_for_until_the_deadline(
    run: Run, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    asked = []
    monkeypatch.setattr(agreement, "ensure", lambda **given: asked.append(given))
    run(timeout_s=timeout_s)
    assert asked == [{"call": "encode_once", "timeout_s": timeout_s}]


# --- with the turn


@pytest.mark.parametrize("default", [True, False], ids=["the group's store", "a store of its own"])
def test_note_names_the_rank_and_the_job_of_its_store(
    run: Run, request_for: MakeRequest, cache_dir: Path, rank_3: None, default: bool
) -> None:
    store = dist.distributed_c10d._get_default_store() if default else dist.HashStore()
    run(store=None if default else store)
    note = last_note(request_for(), cache_dir)
    assert (note.state, note.rank, note.job) == ("done", 3, job_name(store))


def test_collective_in_the_encoder_is_refused_unless_every_rank_encodes(run: Run, encode: Encode, rank_3: None) -> None:
    def reduce() -> dict[str, torch.Tensor]:
        dist.all_reduce(torch.ones(1))
        return encode()

    with pytest.raises(WanshimError, match="called the collective"):
        run(encode=reduce)
    assert run(encode=reduce, mode="per_rank").origin == "per_rank"


def test_encoder_outside_a_job_may_form_a_group_of_its_own(run: Run, encode: Encode) -> None:
    def form() -> dict[str, torch.Tensor]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        return encode()

    assert run(encode=form).origin == "encoded"


def test_embeddings_that_cannot_be_kept_leave_word_of_it_and_warn_at_the_callers_line(
    run: Run, request_for: MakeRequest, cache_dir: Path, full_disk: None
) -> None:
    with pytest.warns(WanshimWarning, match="No space left") as seen:
        assert run().origin == "encoded"
    note = last_note(request_for(), cache_dir)
    assert (note.state, "No space left" in note.reason) == ("uncached", True)
    assert seen[0].filename == run.__code__.co_filename  # type: ignore[attr-defined]


def test_cache_that_cannot_be_opened_warns_at_the_callers_line(run: Run, read_only: Callable[[], None]) -> None:
    read_only()
    with pytest.warns(WanshimWarning) as seen:
        run()
    assert seen[0].filename == run.__code__.co_filename  # type: ignore[attr-defined]


def touch(request: EncodingRequest, cache_dir: Path) -> None:
    for path in request.sources[0].encoder.iterdir():
        path.touch()


def forget(request: EncodingRequest, cache_dir: Path) -> None:
    for path in cache_dir.glob("*.safetensors"):
        path.unlink()


def test_turn_that_ended_is_not_taken_over(
    run: Run, request_for: MakeRequest, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a holder that stopped in the middle is reported; neither an encoding nor a look at moved files is one."""
    origins = []
    for change in (touch, forget, forget):
        origins.append(run().origin)
        change(request_for(), cache_dir)
    origins.append(run().origin)
    assert origins == ["encoded", "cache", "encoded", "encoded"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_part_that_a_killed_writer_left_is_removed(run: Run, request_for: MakeRequest, cache_dir: Path) -> None:
    with CacheDirectory(cache_dir) as directory:
        part = cache_dir / f".{keys(request_for()).key(directory)}.safetensors.0.partial"
    part.mkdir()
    run()
    assert not part.exists()


def test_turn_is_free_though_a_process_that_the_encoder_forked_lives_on(
    run: Run, encode: Encode, request_for: MakeRequest, cache_dir: Path
) -> None:
    forked = []

    def fork_and_encode() -> dict[str, torch.Tensor]:
        forked.append(os.fork())
        if not forked[0]:
            signal.pause()
        return encode()

    try:
        run(encode=fork_and_encode)
        with CacheDirectory(cache_dir) as directory:
            turns = FileLock(directory, keys(request_for()).turn)
            assert turns.claim()
            turns.close()
    finally:
        os.kill(forked[0], signal.SIGKILL)
        os.waitpid(forked[0], 0)


def test_cache_file_says_what_it_was_made_from(run: Run, cache_dir: Path) -> None:
    run()
    (file,) = cache_dir.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        description = json.loads(opened.metadata()["wanshim"])["description"]
    assert (description["prompt"], description["numerics"]) == ("blurry", numerics(CPU))


# --- the device


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.device]]:
    """For which device the key was made, memory given back, and the random state kept."""
    seen: dict[str, list[torch.device]] = {"key": [], "memory": [], "random": []}

    def name(device: torch.device) -> dict[str, str]:
        seen["key"].append(device)
        return {"device": str(device)}

    def keep(devices: list[torch.device]) -> nullcontext[None]:
        seen["random"].extend(devices)
        return nullcontext()

    monkeypatch.setattr(once, "numerics", name)
    monkeypatch.setattr(once, "give_back", seen["memory"].append)
    monkeypatch.setattr(torch.random, "fork_rng", keep)
    return seen


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({"device": "meta"}, "meta"), ({"device": "meta", "encoder_device": "cpu"}, "cpu"),
     ({"encoder_device": "cuda:1"}, "cuda:1")],
    ids=["the same", "the host", "another GPU"],
)  # fmt: skip
def test_key_memory_and_random_state_are_those_of_the_device_that_encodes(
    run: Run, devices: dict[str, list[torch.device]], asked: dict[str, str], expected: str
) -> None:
    run(**asked)
    device = torch.device(expected)
    assert devices == {"key": [device], "memory": [device], "random": [device] if device.type == "cuda" else []}


@pytest.mark.parametrize("why", ["by mode", "no cache", "failure"])
def test_memory_of_the_encoder_is_given_back_also(
    why: str, run: Run, devices: dict[str, list[torch.device]], read_only: Callable[[], None]
) -> None:
    def fail() -> dict[str, torch.Tensor]:
        raise MemoryError("22.7 GB")

    if why == "by mode":
        run(encoder_device="cuda:1", mode="per_rank")
    elif why == "no cache":
        read_only()
        with pytest.warns(WanshimWarning):
            run(encoder_device="cuda:1")
    else:
        with pytest.raises(MemoryError):
            run(encoder_device="cuda:1", encode=fail)
    assert devices["memory"] == [torch.device("cuda:1")]


def test_encoded_prints_shapes_origin_and_seconds() -> None:
    encoded = Encoded(tensors={"embeds": torch.ones(1, 2, 3), "mask": torch.ones(1, 2)}, origin="cache", seconds=1.234)
    assert str(encoded) == "embeds (1, 2, 3), mask (1, 2): cache, 1.23 s"
