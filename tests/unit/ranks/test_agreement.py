from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from wanshim.core.ranks import agreement
from wanshim.core.ranks import group as group_module
from wanshim.core.ranks.group import Group
from wanshim.errors import RankAbsent, RankDisagreement


def carries(host: str = "node-a", wanshim: str = "0.1.0", torch: str = "2.11.0", **features: str) -> dict[str, Any]:
    return {
        "wanshim": wanshim,
        "features": features or {"fastvideo.negative_prompt": "9f2c"},
        "packages": {"torch": torch},
        "host": host,
    }


def meet(
    *fingerprints: dict[str, Any] | None, timeout_s: float = 5.0, store: Any = None, ranks: Sequence[int] = ()
) -> list[Any]:
    """Let `ranks` (default: from 0) with these fingerprints meet in one store; a None never comes."""
    store, ranks = store or dist.HashStore(), list(ranks) or list(range(len(fingerprints)))
    outcomes: dict[int, Any] = {}

    def come(rank: int, fingerprint: dict[str, Any]) -> None:
        try:
            agreement.compare(Group(ranks, ranks.index(rank), store), "test", fingerprint, timeout_s, "decode")
            outcomes[rank] = None
        except (RankDisagreement, RankAbsent) as error:
            outcomes[rank] = error

    coming = [
        (rank, fingerprint) for rank, fingerprint in zip(ranks, fingerprints, strict=True) if fingerprint is not None
    ]
    threads = [threading.Thread(target=come, args=one) for one in coming]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [outcomes[rank] for rank in sorted(outcomes)]


def test_agreement_same_patch_set_on_different_hosts_passes() -> None:
    assert meet(carries("node-a"), carries("node-b"), carries("node-c")) == [None, None, None]


def test_agreement_different_features_raise_the_same_table_everywhere() -> None:
    outcomes = meet(
        carries("node-a"),
        carries("node-b", **{"fastvideo.negative_prompt": "0001", "torch.pg_timeout": "ab"}),
    )
    assert str(outcomes[0]) == str(outcomes[1])
    assert (
        "  rank  host    fastvideo.negative_prompt  torch.pg_timeout\n"
        "  0     node-a  9f2c                       -\n"
        "  1     node-b  0001                       ab\n"
    ) in str(outcomes[0])


def test_agreement_different_versions_are_named() -> None:
    text = str(meet(carries(), carries(wanshim="0.2.0"))[0])
    assert "wanshim" in text.splitlines()[1]
    assert "0.2.0" in text
    assert "fastvideo.negative_prompt" not in text


def test_agreement_different_versions_of_a_package_are_named() -> None:
    outcomes = meet(carries("node-a"), carries("node-b", torch="2.12.0"))
    assert "  rank  host    torch\n  0     node-a  2.11.0\n  1     node-b  2.12.0\n" in str(outcomes[0])
    assert str(outcomes[0]) == str(outcomes[1])


def test_agreement_of_a_group_that_does_not_begin_at_rank_0_names_the_ranks_of_the_job() -> None:
    assert meet(carries("node-a"), carries("node-b"), ranks=(1, 3)) == [None, None]
    outcomes = meet(carries("node-a"), carries("node-b", wanshim="0.2.0"), ranks=(1, 3))
    assert str(outcomes[0]) == str(outcomes[1])
    assert "  1     node-a  0.1.0\n  3     node-b  0.2.0\n" in str(outcomes[0])


def test_agreement_rank_that_never_comes_is_absent_and_not_of_another_patch_set() -> None:
    outcomes = meet(carries(), None, carries(), timeout_s=0.5, ranks=(4, 5, 6))
    assert all(isinstance(outcome, RankAbsent) for outcome in outcomes)
    text = str(outcomes[0])
    assert text.startswith("rank 5 did not call decode within 0.5 s")  # which of the others gave up first may follow
    assert "Expected each of ranks 4, 5, 6 to call decode" in text
    assert "patch set" not in text


@pytest.mark.parametrize("other", ["0.1.0", "0.2.0"])
def test_agreement_of_all_ranks_after_one_asked_alone_compares_what_they_carry_now(other: str) -> None:
    store = dist.HashStore()
    with pytest.raises(RankAbsent):
        agreement.compare(Group([0, 1], 0, store), "test", carries(), 0.05, "decode")
    outcomes = meet(carries(), carries(wanshim=other), store=store)
    assert [type(outcome) for outcome in outcomes] == [RankDisagreement if other == "0.2.0" else type(None)] * 2


def test_agreement_names_all_ranks_that_never_came() -> None:
    (absent,) = meet(carries(), None, None, timeout_s=0.05, ranks=(4, 5, 6))
    assert str(absent).startswith("ranks 5, 6 did not call decode within 0.05 s.")


def test_agreement_of_fingerprints_with_unequal_names_shows_what_a_rank_lacks() -> None:
    table = str(meet(carries(), {"host": "node-b", "release": 3})[0])
    assert "rank  host    fastvideo.negative_prompt  release  torch   wanshim\n" in table
    assert "0     node-a  9f2c                       -        2.11.0  0.1.0\n" in table
    assert "1     node-b  -                          3        -       -\n" in table


class Job:
    """A job whose ranks are threads of this process: what `ensure` asks of torch.distributed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.here, self.asked = dist.HashStore(), threading.local(), Counter[int]()
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: self.here.rank)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
        monkeypatch.setattr(agreement, "refuse_inherited_group", lambda: None)
        monkeypatch.setattr(group_module, "default_store", lambda: self.store)

    def ensure(self, group: OfTorch, fingerprints: dict[int, dict[str, Any]], timeout_s: float = 5.0) -> dict[int, Any]:
        """What `ensure` raises on each of these ranks."""
        ends: dict[int, Any] = {}

        def provide() -> dict[str, Any]:
            self.asked[self.here.rank] += 1
            return fingerprints[self.here.rank]

        def come(rank: int) -> None:
            self.here.rank = rank
            try:
                agreement.ensure(group, call="decode", timeout_s=timeout_s)
                ends[rank] = None
            except (RankAbsent, RankDisagreement) as error:
                ends[rank] = type(error)

        agreement._provider = provide
        threads = [threading.Thread(target=come, args=(rank,)) for rank in fingerprints]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return ends


class OfTorch:
    """A process group, of which only name and ranks are asked."""

    def __init__(self, *ranks: int) -> None:
        self.ranks, self.group_name = list(ranks), str(ranks)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    yield Job(monkeypatch)
    agreement.set_fingerprint_provider(None)


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2), (1, 3)])
def test_agreement_of_a_group_of_any_size_compares_its_ranks(ranks: tuple[int, ...], job: Job) -> None:
    others = dict.fromkeys(ranks[:-1], carries())
    apart = job.ensure(OfTorch(*ranks), {**others, ranks[-1]: carries(wanshim="0.2.0")})
    assert apart == dict.fromkeys(ranks, RankDisagreement)
    assert job.ensure(OfTorch(*ranks), {**others, ranks[-1]: carries()}) == dict.fromkeys(ranks)


def test_agreement_of_one_rank_or_of_other_ranks_asks_nobody(job: Job) -> None:
    assert job.ensure(OfTorch(0), {0: carries()}) == {0: None}
    assert job.ensure(OfTorch(1, 2), {0: carries()}) == {0: None}
    assert job.asked == {}


def test_agreement_of_a_group_is_asked_for_once_and_of_each_group(job: Job) -> None:
    first, second = OfTorch(0, 1), OfTorch(0, 1, 2)
    same = dict.fromkeys(range(3), carries())
    for _ in range(2):
        assert job.ensure(first, {0: same[0], 1: same[1]}) == {0: None, 1: None}
    assert job.asked == {0: 1, 1: 1}
    assert job.ensure(first, {0: same[0]}) == {0: None}  # alone: nobody waits for the others any more
    assert job.ensure(second, same) == dict.fromkeys(range(3))
    assert job.asked == {0: 2, 1: 2, 2: 1}


def test_agreement_that_failed_is_asked_for_again(job: Job) -> None:
    group = OfTorch(0, 1)
    assert job.ensure(group, {0: carries()}, timeout_s=0.05) == {0: RankAbsent}
    assert job.ensure(group, {0: carries(), 1: carries()}) == {0: None, 1: None}


def test_agreement_of_a_new_provider_is_asked_for_again(job: Job) -> None:
    group, same = OfTorch(0, 1), {0: carries(), 1: carries()}
    job.ensure(group, same)
    agreement.set_fingerprint_provider(None)
    assert job.ensure(group, {**same, 1: carries(wanshim="0.2.0")}) == dict.fromkeys(range(2), RankDisagreement)


def test_agreement_outside_a_process_group_or_without_a_provider_asks_nobody(job: Job) -> None:
    agreement.set_fingerprint_provider(None)
    job.here.rank = 0
    agreement.ensure(OfTorch(0, 1), call="decode")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        assert job.ensure(OfTorch(0, 1), {0: carries()}) == {0: None}
    assert job.asked == {}


def test_agreement_module_imports_no_torch() -> None:
    script = "import sys, wanshim.core.ranks.agreement; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
