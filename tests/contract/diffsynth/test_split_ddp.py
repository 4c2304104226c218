"""Two processes train, each over a split of its own: the gradients of one process with the same global batch."""

from __future__ import annotations

from pathlib import Path

import pytest

import wanshim
from tests.contract.diffsynth import ddp_worker
from tests.contract.diffsynth.ddp_jobs import (
    EXACT,
    FLOAT8,
    PIPELINED,
    check_ranks,
    check_same_step,
    forked,
    in_one_process,
    launch,
    lora_of,
)
from tests.contract.diffsynth.ddp_worker import Job


@pytest.mark.slow
def test_ddp_over_splits_gives_the_gradients_of_one_process_with_the_same_global_batch(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="a quantised base is an extra: pip install 'wanshim[torchao]'")
    jobs = [EXACT, FLOAT8, PIPELINED]
    alone = tmp_path / "alone"
    wanshim.activate(f"none,{ddp_worker.EVERY_MICRO_BATCH}")
    for job in jobs:
        ddp_worker.run(in_one_process(job), alone)
    said = forked(tmp_path / "ranks", jobs, WANSHIM_DEVICES="cpu,cpu,cpu,cpu")
    check_ranks(said, jobs)
    for job in jobs:
        check_same_step(job, alone, tmp_path / "ranks", exact=job is not PIPELINED)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ddp_over_splits_writes_the_file_of_plain_ddp(tmp_path: Path, accumulation: int) -> None:
    """Seven samples: an odd one is seen twice, and the last group is partial."""
    job = Job("job", samples=7, accumulation=accumulation)
    plain = launch(tmp_path / "plain", [job])
    said = launch(tmp_path / "split", [job], WANSHIM_DEVICES="cpu,cpu,cpu,cpu")
    assert lora_of(tmp_path / "split", job) == lora_of(tmp_path / "plain", job)
    assert [rank["job"]["seen"] for rank in said] == [rank["job"]["seen"] for rank in plain]
    reason = "2 micro-batches in a pipeline of 2 stages" if accumulation == 2 else "accumulation is 1"
    assert all(any(reason in note for note in rank["job"]["notes"]) for rank in said)


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
    devices: str, rank: int, blocked: bool, share: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wanshim import settings
    from wanshim.adapters.diffsynth.model_split import blocked as refused
    from wanshim.adapters.diffsynth.splitting.load import devices_of

    for name, value in {"WANSHIM_DEVICES": devices, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    read = settings.read()
    assert (refused(read) is not None) is blocked
    if not blocked:
        assert devices_of(read) == share
