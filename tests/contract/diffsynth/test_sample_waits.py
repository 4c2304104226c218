"""A run whose GPU waits for samples says so at its end, of the loader that accelerate prepares."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

from wanshim.adapters.diffsynth.splitting import sample_waits
from wanshim.adapters.diffsynth.splitting.steps import STEPS
from wanshim.core.training import sample_waits as measured
from wanshim.undo import Undo


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return index


def loaded(accelerator: Accelerator, workers: int) -> DataLoader[Any]:
    loader = accelerator.prepare(DataLoader(Slow(), batch_size=None, num_workers=workers))
    for _ in range(2):
        assert list(loader) == [0, 1, 2, 3, 4]
    return loader


@pytest.mark.parametrize("workers", [0, 1])
def test_run_that_waits_for_samples_names_the_workers_that_would_do(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, said = Accelerator(cpu=True), list[str]()
    monkeypatch.setattr(measured, "LEAST_SECONDS", 0.0)
    with Undo() as undo:
        run: Any = SimpleNamespace(call=SimpleNamespace(device=accelerator.device, accelerator=accelerator), undo=undo)
        row: Any = SimpleNamespace(report=said.append)
        sample_waits.apply(run, row)
        loader = loaded(accelerator, workers)
        assert not said
    assert len(said) == 1
    words = rf"the GPU waited \d+ of \d+ s for samples, which the data loader loads by {workers} workers"
    assert re.match(rf"{words}: --dataset_num_workers (?!{workers} )\d+ would be in time", said[0])
    assert not {"__iter__"} & vars(loader.base_dataloader).keys()
    assert "prepare_data_loader" not in vars(accelerator)


def test_runs_of_a_gpu_are_timed_and_no_others() -> None:
    (step,) = (one for one in STEPS if one.apply.__closure__ and "splitting.sample_waits" in str(cells(one.apply)))
    for device, timed in (("cuda", True), ("cpu", False)):
        run: Any = SimpleNamespace(call=SimpleNamespace(device=SimpleNamespace(type=device)))
        assert step.on(run) is timed


def cells(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__]
