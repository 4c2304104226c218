"""Real processes on one empty cache: one encodes, and whatever happens to it, nobody waits for ever."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.encoding.racer import race_all
from tests.forking import forking


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("text_encoder", "tokenizer"):
        folder = tmp_path / "model" / name
        folder.mkdir(parents=True)
        (folder / "weights.bin").write_bytes(name.encode() * 1000)
    for name in ("calls", "pids", "results", "waiting"):
        (tmp_path / name).mkdir()
    return tmp_path


def start(root: Path, *behaviours: str) -> BaseProcess:
    racers = forking().Process(target=race_all, args=(root, behaviours))
    racers.start()
    return racers


def results(root: Path, racers: BaseProcess) -> dict[int, dict[str, Any]]:
    racers.join(240)
    assert racers.exitcode == 0
    found = [json.loads(path.read_text()) for path in (root / "results").iterdir()]
    return {result["rank"]: result for result in found}


def calls(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "calls").iterdir())


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 240  # a bound for a machine under load
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.02)


def kill(root: Path, rank: int) -> None:
    os.kill(int((root / "pids" / str(rank)).read_text()), signal.SIGKILL)


def test_eight_processes_on_an_empty_cache_encode_once(root: Path) -> None:
    found = results(root, start(root, *["encode"] * 8))
    assert len(calls(root)) == 1
    assert sorted(line["origin"] for line in found.values()).count("encoded") == 1
    assert {tuple(line["embeds"]) for line in found.values()} == {tuple(float(i) for i in range(8))}
    assert len(found) == 8


def test_second_run_of_processes_opens_no_encoder_file(root: Path, count_opens: Callable[..., Any]) -> None:
    results(root, start(root, "encode", "encode"))
    counter = count_opens(root / "model")
    found = results(root, start(root, "encode", "encode"))
    assert [line["origin"] for line in found.values()] == ["cache", "cache"]
    assert counter.opened == []


def test_writer_killed_while_it_encodes_is_replaced(root: Path) -> None:
    racers = start(root, "stall", "encode", "encode")
    wait_for(root / "calls" / "0")
    kill(root, 0)
    found = results(root, racers)
    assert sorted(found) == [1, 2]
    assert sorted(line["origin"] for line in found.values()) == ["encoded", "waited"]
    assert max(line["seconds"] for line in found.values()) < 20


def test_writer_killed_while_it_writes_leaves_no_half_file(root: Path) -> None:
    racers = start(root, "stall while writing", "encode")
    wait_for(root / "calls" / "0.writing")
    assert list((root / "cache").glob(".*.partial"))
    kill(root, 0)
    found = results(root, racers)
    assert found[1]["origin"] == "encoded"
    assert len(list((root / "cache").glob("*.safetensors"))) == 1
    assert not list((root / "cache").glob(".*.safetensors.*.partial"))


def test_writers_error_reaches_every_waiting_process(root: Path) -> None:
    found = results(root, start(root, "fail", "encode", "encode", "encode"))
    assert found[0]["error"] == "MemoryError"
    assert [found[rank]["error"] for rank in (1, 2, 3)] == ["RanksFailed"] * 3
    assert all("rank 0" in found[rank]["message"] for rank in (1, 2, 3))
    assert all("MemoryError: 22.7 GB do not fit" in found[rank]["message"] for rank in (1, 2, 3))
    assert calls(root) == ["0"]
