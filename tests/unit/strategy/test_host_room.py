"""The room in host memory that the plan of a training counts with, for this process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from wanshim.adapters.diffsynth.splitting import launch
from wanshim.core.shared import host_memory


@pytest.mark.parametrize(
    ("processes", "own", "expected"),
    [(1, 0, 2400), (2, 0, 1200), (2, 1000, 1200 + 200), (2, 800, 1200), (2, 5000, 1200 + 400), (4, 5000, 600 + 200)],
    ids=["one process", "two on the host", "side models apart", "side models alone", "all weights", "a third at most"],
)
def test_host_memory_is_shared_by_the_processes_and_only_the_dit_s_weights_count_twice(
    monkeypatch: pytest.MonkeyPatch, processes: int, own: int, expected: int
) -> None:
    """2400 bytes are available on the host; the DiT has 400, the side models 800."""
    model = torch.nn.ModuleDict(
        {"dit": torch.nn.Linear(100, 1, bias=False), "vae": torch.nn.Linear(200, 1, bias=False)}
    )
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2400)
    monkeypatch.setattr(host_memory, "own_bytes", lambda: own)
    call, job = SimpleNamespace(dit=model["dit"], model=model), SimpleNamespace(local_processes=processes)
    assert launch._host_memory(call, job) == expected  # type: ignore[arg-type]
