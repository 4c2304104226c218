"""Two processes train, each over a split of its own: the gradients, and so the file, of plain DDP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 200


def launch(
    folder: Path, accumulation: int, processes: int = 2, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """All ranks, as `accelerate launch --num_processes` would start them, ended after LIMIT_S."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared = {**size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCUMULATION": str(accumulation), **variables}
    shared |= {} if "ON_GPU" in variables else {"ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "tests.contract.diffsynth.ddp_worker", str(folder)]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for rank in range(processes)
    ]
    done = []
    try:
        for process in started:
            output, _ = process.communicate(timeout=LIMIT_S)
            done.append(subprocess.CompletedProcess(command, process.returncode, output))
            if process.returncode:  # the launcher ends the others
                for other in started:
                    other.terminate()
    finally:
        for process in started:
            process.kill()
    return done


def trained(
    folder: Path, accumulation: int, processes: int = 2, **variables: str
) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    for rank in launch(folder, accumulation, processes, **variables):
        assert rank.returncode == 0, rank.stdout
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    return files, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ddp_over_splits_trains_as_plain_ddp(tmp_path: Path, accumulation: int) -> None:
    expected, plain = trained(tmp_path / "plain", accumulation)
    found, ranks = trained(tmp_path / "split", accumulation, WANSHIM_DEVICES="cpu,cpu,cpu,cpu")
    assert len(expected) == 1
    assert found == expected
    assert [rank["seen"] for rank in ranks] == [rank["seen"] for rank in plain]
    assert plain[0]["seen"] != plain[1]["seen"]
    for rank in ranks:
        assert any("split into 2 stages" in note for note in rank["notes"])
        assert any("ACCELERATE_BYPASS_DEVICE_MAP=true" in note for note in rank["notes"])
        assert any(
            ("2 micro-batches in 2 lanes" if accumulation == 2 else "accumulation is 1") in n for n in rank["notes"]
        )
        assert rank["bypass"] is None  # put back


@pytest.mark.parametrize(
    ("devices", "rank", "blocked", "share"),
    [
        ("a,b,c,d", 0, False, ("a", "c")),
        ("a,b,c,d", 1, False, ("b", "d")),
        ("a,b,c", 0, True, None),
        ("a,b", 0, True, None),
    ],
)
def test_processes_of_a_machine_share_the_devices_in_turn(
    devices: str, rank: int, blocked: bool, share: tuple[str, ...] | None
) -> None:
    from wanshim.adapters.diffsynth.split_loading import devices_of
    from wanshim.adapters.diffsynth.split_refusals import blocked as refused

    from wanshim import settings

    read = settings.read({"WANSHIM_DEVICES": devices, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)})
    assert (refused(read) is not None) is blocked
    if not blocked:
        assert devices_of(read) == share
