"""Frozen weights streamed over the host link of two real GPUs, through DiffSynth's own training loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.diffsynth.ddp_jobs import launch, lora_of
from tests.contract.diffsynth.ddp_worker import Job
from tests.gpu.split.variables import ON_GPU


@pytest.mark.gpu(2)
def test_two_processes_stream_on_gpus_with_the_gradients_and_file_of_plain_ddp(tmp_path: Path) -> None:
    plain = Job("job", samples=3, accumulation=1)
    streamed = Job("job", samples=3, accumulation=1, variables={"WANSHIM_PLAN": "stream:3"})
    launch(tmp_path / "plain", [plain], **ON_GPU)
    said = launch(tmp_path / "streamed", [streamed], **ON_GPU)
    assert lora_of(tmp_path / "streamed", streamed) == lora_of(tmp_path / "plain", plain)
    for rank, ours in enumerate(said):
        found, expected = (tmp_path / way / f"job.gradients{rank}" for way in ("streamed", "plain"))
        assert found.read_bytes() == expected.read_bytes()
        assert any("streaming 3 of 4 blocks" in note for note in ours["job"]["notes"])
