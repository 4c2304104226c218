"""Ranks of one machine count themselves: launchers such as srun and mpirun do not say how many there are."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from wanshim import settings  # noqa: E402
from wanshim.core.ranks import host  # noqa: E402
from wanshim.core.ranks.host import host_ranks  # noqa: E402


def found(launched: tuple[int, int] | None = None, wait_s: float = 30.0) -> tuple[tuple[int, ...], int, bool]:
    """The job's numbers of the ranks here, this one's place among them, and whether they can meet."""
    here = host_ranks(launched, wait_s=wait_s)
    return here.ranks, here.rank, here.store is not None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.HashStore]:
    """Rank 1 of four, as far as `host_ranks` looks."""
    store = dist.HashStore()
    monkeypatch.setattr(host, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(host, "machine", lambda: "b/1")
    member = dist.distributed_c10d.GroupMember
    before, member.WORLD = member.WORLD, type("Group", (), {})()
    yield store
    member.WORLD = before


def test_ranks_of_two_machines_are_counted_by_their_machines(group: dist.HashStore) -> None:
    def come() -> None:
        for rank, name in enumerate(("a/1", None, "b/1", "a/1")):
            if name is not None:
                group.set(f"wanshim/machine/{rank}", name)

    others = threading.Timer(0.2, come)
    others.start()
    assert found() == ((1, 2), 0, True)
    others.join()
    assert found((1, 3), 0) == ((1, 2), 0, True)  # the launcher was told another number


def test_place_of_a_rank_is_that_among_the_ranks_of_its_machine(
    group: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    for rank, name in enumerate(("a/1", "b/1", "b/1", "a/1")):
        group.set(f"wanshim/machine/{rank}", name)
    assert found() == ((1, 2), 1, True)


def test_launcher_that_started_all_ranks_is_believed_and_nobody_is_waited_for(group: dist.HashStore) -> None:
    assert found((1, 4), 0) == ((0, 1, 2, 3), 1, True)


def test_ranks_that_do_not_come_leave_the_launchers_numbers(group: dist.HashStore) -> None:
    assert found((1, 2), 0.01) == ((0, 1), 1, True)
    assert found(wait_s=0.01) == ((0,), 0, False)


def test_process_without_a_group_has_the_launchers_numbers_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (settings.launched(), settings.is_one_of_several()) == (None, False)
    assert found() == ((0,), 0, False)
    assert found((1, 2)) == ((0, 1), 1, False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (settings.launched(), settings.is_one_of_several()) == ((0, 2), True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert settings.launched() is None
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (settings.launched(), settings.is_one_of_several()) == (None, True)
