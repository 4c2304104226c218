"""Where what the first rank shares lies afterwards, and which states are drawn from: devices that a CPU lacks.

gloo's ranks have one kind of device (`tests/distributed/sequence/test_leader.py`); here meta and fake tensors stand for
a GPU's, and torch.cuda's states are doubles. `tests/gpu/sequence/test_leader.py` has the real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from wanshim.core.sequence import random_states, set_random_states
from wanshim.core.sequence.leader import Leader


class Rank:
    """One of two ranks that leave each other texts and tensors in a dict."""

    ranks = (0, 1)
    watch = SimpleNamespace(fail_with=lambda error: None)

    def __init__(self, rank: int, left: dict[str, Any]) -> None:
        self.rank, self.left = rank, left

    def publish(self, key: str, text: str) -> None:
        self.left[key] = text

    def published(self, key: str, step: str) -> str:
        return self.left[key]

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self.left.setdefault("sent to", []).append(tensor.device.type)
        return tensor


def leader(rank: int, left: dict[str, Any]) -> Leader:
    return Leader(Rank(rank, left), SimpleNamespace(join=lambda call: None))  # type: ignore[arg-type]


def test_tensor_lies_on_the_cpu_if_it_lay_there_on_the_first_rank_and_else_on_the_device() -> None:
    left: dict[str, Any] = {}
    made = {"latents": torch.empty(2, 3, device="meta"), "mask": torch.ones(4)}
    shared = leader(0, left).share(lambda: made, torch.device("meta"))
    assert shared is made
    assert left["sent to"] == ["meta", "meta"]
    with FakeTensorMode():
        found = leader(1, left).share(lambda: pytest.fail("made twice"), torch.device("cuda:1"))
        assert {name: (str(t.device), tuple(t.shape)) for name, t in found.items()} == {
            "latents": ("cuda:1", (2, 3)),
            "mask": ("cpu", (4,)),
        }


def test_random_states_hold_those_of_the_device_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {f"cuda:{index}": torch.tensor([index]) for index in range(3)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state}))
    set_random_states(random_states(torch.device("cuda:2")), torch.device("cuda:1"))
    assert {device: state.item() for device, state in states.items()} == {"cuda:0": 0, "cuda:1": 2, "cuda:2": 2}
    set_random_states(random_states(torch.device("cpu")), torch.device("cuda:0"))
    assert states["cuda:0"].item() == 0
