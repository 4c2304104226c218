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
from wanshim.core.ranks.group import Group
from wanshim.core.streaming import shared_memory
from wanshim.core.streaming.shared_weights import load_once
from wanshim.errors import RanksFailed, WanshimError


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

        return load_once(Group(range(count), number, store), read, from_state)

    return at_once(*(partial(rank, number) for number in range(count))), loaded


def test_one_rank_reads_the_files_and_all_have_the_same_bits() -> None:
    found, loaded = as_ranks(lambda number: made(), 3)
    assert loaded == [0]
    for model, reason in found:
        assert not reason
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in made().state_dict().items())
    assert not found[0][0][0].weight.requires_grad


def test_rank_that_meets_nobody_loads_its_own() -> None:
    model, reason = load_once(Group(), made, from_state)
    assert not reason
    assert torch.equal(model[0].weight, made()[0].weight)


def test_what_a_rank_writes_no_other_sees() -> None:
    (first, _), (second, _) = as_ranks(lambda number: made())[0]
    with torch.no_grad():
        first[0].bias += 1
        second[2].weight.zero_()
    assert torch.equal(second[0].bias, made()[0].bias)
    assert torch.equal(first[2].weight, made()[2].weight)


def test_without_room_each_rank_loads_its_own_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(num_bytes: int) -> int:
        raise OSError("full")

    monkeypatch.setattr(shared_memory, "unnamed_file", full)
    found, loaded = as_ranks(lambda number: made())
    assert sorted(loaded) == [0, 1]
    assert all("GiB of host memory for" in reason for _, reason in found)
    assert torch.equal(found[1][0][0].weight, made()[0].weight)


def test_ranks_that_do_not_see_each_others_files_load_their_own_and_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unseen(offer: object) -> int:
        raise WanshimError("memory of the first rank of this host cannot be opened")

    monkeypatch.setattr(shared_memory, "_opened", unseen)
    found, loaded = as_ranks(lambda number: made())
    assert sorted(loaded) == [0, 1]
    assert all("cannot be opened" in reason for _, reason in found)


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
    assert isinstance(found[1], RanksFailed)
    assert "load_once failed on rank 0: FileNotFoundError: model.safetensors" in str(found[1])


def test_rank_that_cannot_write_its_weights_ends_the_others_with_its_error() -> None:
    def full(number: int) -> nn.Module:
        model = made()

        def load_state_dict(*args: object, **options: object) -> None:
            raise MemoryError("no page")

        vars(model)["load_state_dict"] = load_state_dict
        return model

    found, _ = as_ranks(full)
    assert isinstance(found[0], MemoryError)
    assert isinstance(found[1], RanksFailed)
    assert "rank 0 failed: MemoryError: no page" in str(found[1])
