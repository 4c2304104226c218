"""DDP over splits on NCCL: two processes train what one process trains on the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.diffsynth import ddp_jobs as ddp
from tests.gpu.split.variables import ON_GPU

# Rank r takes every second of them from the r-th: two GPUs a process, or both stages on the one it has.
DEVICES = pytest.mark.parametrize(
    "devices",
    [
        pytest.param("cuda:0,cuda:1,cuda:2,cuda:3", marks=pytest.mark.gpu(4), id="two each"),
        pytest.param("cuda:0,cuda:1,cuda:0,cuda:1", marks=pytest.mark.gpu(2), id="one each"),
    ],
)


@DEVICES
def test_ddp_over_splits_on_gpus_gives_the_gradients_of_one_process_with_the_same_global_batch(
    tmp_path: Path, devices: str
) -> None:
    jobs = [ddp.EXACT, ddp.FLOAT8, ddp.PIPELINED]
    ddp.launch(tmp_path / "alone", [ddp.in_one_process(job) for job in jobs], processes=1, **ON_GPU)
    said = ddp.launch(tmp_path / "ranks", jobs, WANSHIM_DEVICES=devices, **ON_GPU)
    ddp.check_ranks(said, jobs)
    for job in jobs:
        ddp.check_same_step(job, tmp_path / "alone", tmp_path / "ranks", exact=job is not ddp.PIPELINED)


@DEVICES
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ddp_over_splits_on_gpus_writes_the_file_of_plain_ddp(tmp_path: Path, devices: str, accumulation: int) -> None:
    job = ddp.Job("job", samples=8, accumulation=accumulation)
    ddp.launch(tmp_path / "plain", [job], **ON_GPU)
    ddp.launch(tmp_path / "split", [job], WANSHIM_DEVICES=devices, **ON_GPU)
    assert ddp.lora_of(tmp_path / "split", job) == ddp.lora_of(tmp_path / "plain", job)
