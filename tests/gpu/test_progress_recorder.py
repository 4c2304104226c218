"""The recorder on a GPU: its calls on the training thread never wait for the device."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from wanshim.core.training.recorder import RunRecorder, TrainingRun

pytestmark = pytest.mark.gpu(1)
RUN = TrainingRun("run", "test 1.0", "run", None)


def busy(matrix: torch.Tensor) -> torch.Tensor:
    """A loss that the device needs a good while for."""
    result = matrix
    for _ in range(40):
        result = result @ matrix
    return result.float().mean()


def test_step_path_calls_nothing_that_synchronises(tmp_path: Path) -> None:
    """CUDA's sync debug mode raises on any call that waits; a loss read on the spot shows that it would."""
    matrix = torch.randn(2048, 2048, device="cuda") / 2048**0.5
    recorder = RunRecorder(tmp_path, RUN, 0, ["cuda:0"])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(5):
            recorder.begin_step(0, 1e-4)
            loss = busy(matrix)
            recorder.end_step(loss, steps_optimizer=bool(step % 2))
        with pytest.raises(RuntimeError, match="synchroniz"):
            loss.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    recorder.close()
    records = [json.loads(line) for line in next(recorder.folder.glob("*.jsonl")).read_text().splitlines()]
    steps = [record for record in records if "event" not in record]
    assert [record["loss"] for record in steps] == pytest.approx([busy(matrix).item()] * 5)


def test_step_path_returns_while_the_device_still_works(tmp_path: Path) -> None:
    matrix = torch.randn(8192, 8192, device="cuda") / 8192**0.5
    recorder = RunRecorder(tmp_path, RUN, 0, ["cuda:0"])
    recorder.end_step(busy(matrix), steps_optimizer=True)  # the first pinned page and event are made here
    torch.cuda.synchronize()
    loss = busy(matrix)
    done = torch.cuda.Event()
    done.record()
    begin = time.perf_counter()
    recorder.end_step(loss, steps_optimizer=True)
    inside = time.perf_counter() - begin
    assert not done.query()
    assert inside < 0.05  # a bound against waiting for 40 products of this size, not a measure
    recorder.close()
