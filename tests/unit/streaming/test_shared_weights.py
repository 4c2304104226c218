"""A model loaded once for the ranks of a host, which are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit.threads import at_once
from wanshim.core.streaming import LocalRanks, shared_memory, shared_weights
from wanshim.core.streaming.shared_weights import load_once
from wanshim.errors import HostMemoryInvalid, WanshimError


class First:  # counts what a process does, and these ranks have one process
    def __iadd__(self, one: int) -> First:
        return self

    def __str__(self) -> str:
        return "1"


@pytest.fixture(autouse=True)
def _first_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_shares", First())
    monkeypatch.setattr(shared_weights, "_loads", First())


def made(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, dtype=torch.bfloat16))
    model[0].weight.requires_grad_(False)
    return model


def from_state(state: Mapping[str, torch.Tensor]) -> nn.Module:
    with torch.device("meta"):
        model = made()
    model.load_state_dict(dict(state), assign=True)
    return model


def as_ranks(load: Callable[[int], nn.Module], count: int = 2) -> tuple[list[Any], list[int]]:
    """What each rank's call returned or raised, and which ranks read the files."""
    store, loaded = dist.HashStore(), []

    def rank(number: int) -> Any:
        def read() -> nn.Module:
            loaded.append(number)
            return load(number)

        host = LocalRanks(number, count, store, "here/boot 7", timeout_s=20.0)
        return load_once(host, read, from_state)

    return at_once(*(partial(rank, number) for number in range(count))), loaded


def test_one_rank_reads_the_files_and_all_have_the_same_bits() -> None:
    found, loaded = as_ranks(lambda number: made(), 3)
    assert loaded == [0]
    for model, reason in found:
        assert not reason
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in made().state_dict().items())
    assert not found[0][0][0].weight.requires_grad


def test_what_a_rank_writes_no_other_sees() -> None:
    (first, _), (second, _) = as_ranks(lambda number: made())[0]
    with torch.no_grad():
        first[0].bias += 1
        second[2].weight.zero_()
    assert torch.equal(second[0].bias, made()[0].bias)
    assert torch.equal(first[2].weight, made()[2].weight)


def test_without_room_each_rank_loads_its_own_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise HostMemoryInvalid("1.00 GiB of shared memory in /dev/shm: full")

    monkeypatch.setattr(shared_memory, "_create", full)
    found, loaded = as_ranks(lambda number: made())
    assert sorted(loaded) == [0, 1]
    assert all("shared memory" in reason for _, reason in found)
    assert torch.equal(found[1][0][0].weight, made()[0].weight)


def test_tied_weights_are_not_shared() -> None:
    def tied(number: int) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    found, loaded = as_ranks(tied)
    assert sorted(loaded) == [0, 1]
    assert {reason for _, reason in found} == {"two names have the same weight"}


def test_rank_that_cannot_load_ends_the_others_with_its_error() -> None:
    def failing(number: int) -> nn.Module:
        raise FileNotFoundError("model.safetensors")

    found, loaded = as_ranks(failing)
    assert loaded == [0]
    assert isinstance(found[0], FileNotFoundError)
    assert isinstance(found[1], WanshimError)
    assert "FileNotFoundError: model.safetensors" in str(found[1])
