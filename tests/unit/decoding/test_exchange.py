"""How ranks meet, wait for each other and part, with threads as ranks of one store and no connection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wanshim.core.decoding.ranks import exchange
from wanshim.core.decoding.ranks.exchange import (
    Comm,
    PeerLost,
    Verdict,
    in_memory_order,
    packed,
    receive_buffer,
)
from wanshim.core.ranks import group as group_module
from wanshim.core.ranks import store as store_module
from wanshim.core.ranks.group import KEPT_ROUNDS, Group
from wanshim.errors import ModelInvalid, RankAbsent, RanksFailed

CPU = torch.device("cpu")
Make = Callable[..., Comm]


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


@pytest.fixture
def make(store: dist.HashStore) -> Make:
    """One rank of ranks 4 and 7 of a job."""
    return lambda place, deadline=20.0: Comm("decode", Group([4, 7], place, store), deadline, CPU)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    ends: list[Any] = [None] * len(calls)
    threads = [
        threading.Thread(target=lambda i=i, call=call: ends.__setitem__(i, call()), daemon=True)
        for i, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends


def test_ranks_get_the_requests_and_verdicts_of_all_in_rank_order(make: Make) -> None:
    ranks = make(0), make(1)
    for turn in range(2):
        met = at_once(*(partial(rank.meet, {"turn": turn, "rank": rank.rank}) for rank in ranks))
        assert met == [[{"turn": turn, "rank": 0}, {"turn": turn, "rank": 1}]] * 2
        verdicts = [Verdict(rank=0, kind="done"), Verdict(rank=1, kind="oom", text=f"turn {turn}")]
        assert at_once(*(partial(rank.conclude, verdicts[rank.rank]) for rank in ranks)) == [verdicts] * 2
        for rank in ranks:
            rank.next_attempt()
        again = [Verdict(rank=0, kind="done"), Verdict(rank=1, kind="done")]
        assert at_once(*(partial(rank.conclude, again[rank.rank]) for rank in ranks)) == [again] * 2


def test_attempt_that_one_rank_alone_went_on_to_does_not_outlive_its_round(make: Make) -> None:
    ranks = make(0), make(1)
    ranks[0].next_attempt()
    done = [Verdict(rank=rank, kind="done") for rank in range(2)]
    ends = at_once(*(lambda r=r: (r.meet({}), r.conclude(done[r.rank]))[1] for r in ranks))
    assert ends == [done, done]


def test_rank_without_others_waits_for_nobody() -> None:
    alone, done = Comm("decode", None, 5.0, CPU), Verdict(rank=0, kind="done")
    assert (alone.size, alone.rank, alone.ranks) == (1, 0, [0])
    assert alone.meet({"a": 1}) == [{"a": 1}]
    assert alone.conclude(done) == [done]
    alone.connect()
    alone.checkpoint()
    alone.close()


def test_rank_that_does_not_come_is_named_by_its_number_in_the_job(make: Make) -> None:
    with pytest.raises(RankAbsent, match=r"rank 7 did not call decode within 0\.05 s"):
        make(0, deadline=0.05).meet({})


@pytest.mark.parametrize(("kind", "waited"), [("done", "0.5"), ("peer", "0.1")])
def test_rank_that_leaves_no_verdict_is_lost_and_who_has_waited_already_waits_a_fifth(
    kind: str, waited: str, make: Make
) -> None:
    mine = Verdict(rank=0, kind=kind)
    assert make(0, deadline=0.5).conclude(mine) == [
        mine,
        Verdict(rank=1, kind="lost", text=f"no answer within {waited} s"),
    ]


@pytest.mark.parametrize(("kind", "seconds"), [("done", 20.0), ("peer", 4.0)])
def test_verdict_is_waited_for_until_the_deadline(
    kind: str, seconds: float, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(exchange.time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(exchange, "wait_for", lambda store, keys, limit: waits.append(limit))
    make(1, deadline=20.0).conclude(Verdict(rank=1, kind=kind))
    assert waits == [seconds]


def test_verdicts_of_old_rounds_leave_the_store(make: Make, store: dist.HashStore) -> None:
    ranks, done = (make(0), make(1)), [Verdict(rank=rank, kind="done") for rank in range(2)]
    counts = []
    for _ in range(3 * KEPT_ROUNDS):
        at_once(*(lambda r=r: (r.meet({}), r.conclude(done[r.rank])) for r in ranks))
        counts.append(store.num_keys())
    assert counts[-1] == counts[2 * KEPT_ROUNDS]


def test_store_that_is_lost_is_an_error_that_names_the_rank(make: Make) -> None:
    class Lost:
        def set(self, *_: object) -> None:
            raise RuntimeError("connection reset\nframe #0: c10")

    comm = make(1)
    comm._store = Lost()
    with pytest.raises(RanksFailed, match=r"rank 7 cannot reach the store of torch.distributed: connection reset\."):
        comm.conclude(Verdict(rank=1, kind="done"))


def test_second_thread_of_a_rank_gives_up_at_the_deadline(make: Make) -> None:
    comm = make(0, deadline=0.05)
    with (
        comm.alone(),
        pytest.raises(RanksFailed, match=r"another thread of rank 4 has been at it for 0\.05 s"),
        make(0, deadline=0.05).alone(),
    ):
        pass
    with make(0, deadline=0.05).alone():
        pass


def test_wait_for_the_device_ends_at_three_quarters_of_the_deadline(make: Make) -> None:
    comm = make(0, deadline=0.04)
    comm.step = "halo 3"
    with pytest.raises(PeerLost, match=r"step 'halo 3': nothing within 0\.03 s"):
        comm._poll(lambda: False)
    comm._poll(lambda: True)


@pytest.mark.parametrize(("kind", "fails"), [("error", True), ("oom", True), ("done", False), ("unequal", False)])
def test_wait_for_the_device_ends_when_a_peer_has_failed(
    kind: str, fails: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_LOOK_SECONDS", 0.0)
    comm, peer, looks = make(0, deadline=60.0), make(1), iter([False] * 5 + [True])
    peer._leave("verdict", f'{{"rank": 1, "kind": "{kind}", "text": ""}}')
    comm._leave("verdict", '{"rank": 0, "kind": "error", "text": "its own"}')
    if fails:
        with pytest.raises(PeerLost, match="a peer failed"):
            comm._poll(lambda: next(looks))
    else:
        comm._poll(lambda: next(looks))


class Peers:
    """Open connections: what was sent, and how long each wait may take."""

    def __init__(self, error: str = "") -> None:
        self.error, self.calls, self.limits = error, [], []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Peers:
        self.calls.append(("send", tensors[0].shape, peer))
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Peers:
        self.calls.append(("recv", tensors[0].shape, peer))
        return self

    def wait(self, limit: timedelta) -> None:
        self.limits.append(limit.total_seconds())
        if self.error:
            raise RuntimeError(self.error)

    def abort(self) -> None:
        self.calls.append(("abort",))
        raise RuntimeError("whatever state it is in")

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


def test_every_tensor_is_sent_and_received_and_each_wait_is_bounded(make: Make) -> None:
    comm = make(0, deadline=8.0)
    comm._peers = peers = Peers()
    comm.exchange("halo", [(torch.zeros(2), 1)], [(torch.zeros(3), 1), (torch.zeros(4), 1)])
    assert peers.calls == [("send", (2,), 1), ("recv", (3,), 1), ("recv", (4,), 1)]
    assert peers.limits == [6.0] * 3
    assert comm.step == "halo"
    comm.exchange("nothing to do", [], [])
    assert comm.step == "halo"


def test_failed_wait_names_its_step_and_the_first_line_of_the_cause(make: Make) -> None:
    comm = make(0)
    comm._peers = Peers("peer closed\nframe #0: c10")
    with pytest.raises(PeerLost) as caught:
        comm.exchange("halo 3", [(torch.zeros(2), 1)], [])
    assert str(caught.value) == "waiting in step 'halo 3': peer closed"
    assert caught.value.step == "halo 3"


def test_connections_are_given_up_whatever_state_they_are_in(make: Make) -> None:
    comm = make(0)
    comm._peers = peers = Peers()
    comm.close()
    comm.close()
    assert peers.calls == [("abort",), ("shutdown",)]
    with pytest.raises(PeerLost, match="the connections are closed"):
        comm.exchange("halo", [(torch.zeros(2), 1)], [])


class Stream:
    """A GPU's stream that has come as far as the test lets it, and connections on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded, self.reached, self.calls = 0, 0, list[Any]()
        monkeypatch.setattr(torch.cuda, "Event", lambda: StreamEvent(self))

    def attach(self, comm: Comm) -> Comm:
        comm.device, comm._peers = torch.device("cuda:1"), self
        return comm

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("send", tensors[0].numel(), peer))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("recv", tensors[0].numel(), peer))

    def _end_coalescing(self) -> Stream:
        self.calls.append("end")
        return self

    def wait(self) -> None:
        self.calls.append("ordered")


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.number = stream, 0

    def record(self) -> None:
        self.stream.recorded += 1
        self.number = self.stream.recorded

    def query(self) -> bool:
        return 0 < self.number <= self.stream.reached


def test_exchange_on_a_gpu_is_one_group_of_calls_that_orders_the_stream(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(monkeypatch)
    stream.attach(make(0)).exchange("halo", [(torch.zeros(2), 1)], [(torch.zeros(3), 1), (torch.zeros(4), 1)])
    assert stream.calls == ["start", ("send", 2, 1), ("recv", 3, 1), ("recv", 4, 1), "end", "ordered"]
    assert stream.recorded == 0


def test_host_is_at_most_two_checkpoints_of_four_exchanges_ahead_of_the_gpu(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(monkeypatch)
    comm = stream.attach(make(0, deadline=0.04))
    for _ in range(7):
        comm.exchange("halo 3", [(torch.zeros(2), 1)], [])
    assert stream.recorded == 1  # after the fourth: nothing before it to wait for
    with pytest.raises(PeerLost, match=r"step 'halo 3': nothing within 0\.03 s"):
        comm.exchange("halo 3", [(torch.zeros(2), 1)], [])
    stream.reached = 2
    for _ in range(4):
        comm.exchange("halo 4", [(torch.zeros(2), 1)], [])
    assert stream.recorded == 3


def test_checkpoint_awaits_the_one_before_and_a_drain_this_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(monkeypatch)
    comm = stream.attach(make(0, deadline=0.04))
    comm.checkpoint()
    stream.reached = 1
    comm.checkpoint()
    with pytest.raises(PeerLost):
        comm.checkpoint(drain=True)
    stream.reached = 9
    comm.checkpoint(drain=True)
    stream.reached = 0
    comm.checkpoint()  # the drain left nothing to wait for
    comm.exchange("halo", [(torch.zeros(2), 1)], [])
    comm.close()
    comm.checkpoint()  # nor do closed connections


def test_only_the_job_s_first_rank_stays_until_the_others_have_read_the_verdicts(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may host the store. Here it is the second of its group."""
    waits: dict[int, list[list[str]]] = {0: [], 1: []}
    ranks = []
    for place in (0, 1):
        ranks.append(Comm("decode", Group([4, 0], place, store), 20.0, CPU))
        ranks[place]._leave("verdict", f'{{"rank": {place}, "kind": "done", "text": ""}}')
    for place in (1, 0):
        for module in (exchange, store_module):
            mine = waits[place]
            monkeypatch.setattr(module, "wait_for", lambda store, keys, limit, mine=mine: mine.append(keys) or True)
        ranks[place].conclude(Verdict(rank=place, kind="done"))
    assert waits == {0: [["0.0/verdict/1"]], 1: [["0.0/verdict/0"], ["0.0/all read"]]}
    assert ranks[0]._store.check(["0.0/all read"])


PLAIN = torch.arange(2 * 3 * 2 * 4 * 5.0).view(2, 3, 2, 4, 5)
LAST = PLAIN.contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("x", [PLAIN, LAST], ids=["channels first", "channels last"])
def test_dense_buffer_is_sent_from_its_own_memory(x: torch.Tensor) -> None:
    sent = in_memory_order(x)
    assert sent.is_contiguous()
    assert sent.data_ptr() == x.data_ptr()
    assert sent.numel() == x.numel()


def test_buffer_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="has gaps; it must be packed"):
        in_memory_order(LAST[..., 1:])


def test_what_lies_channels_last_is_sent_and_received_where_it_is() -> None:
    assert packed(LAST).data_ptr() == LAST.data_ptr()
    assert receive_buffer(LAST) is LAST


@pytest.mark.parametrize("theirs", [PLAIN, LAST], ids=["from first", "from last"])
@pytest.mark.parametrize("mine", [PLAIN, LAST], ids=["to first", "to last"])
@pytest.mark.parametrize("part", [slice(None), slice(1, 5)], ids=["whole", "with gaps"])
def test_ranks_that_hold_a_window_in_different_layouts_send_the_same_memory(
    part: slice, mine: torch.Tensor, theirs: torch.Tensor
) -> None:
    ours, target = theirs[..., part], torch.zeros_like(mine)[..., part]
    sent, buffer = packed(ours), receive_buffer(target)
    in_memory_order(buffer).copy_(in_memory_order(sent))  # a message knows nothing but memory
    target.copy_(buffer)
    assert torch.equal(target, ours)


def test_rank_outside_the_group_is_refused_with_those_inside(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(group_module, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 7])
    with pytest.raises(ModelInvalid, match=r"rank 5 is not in the group that decodes\. Expected one of ranks 4, 7"):
        exchange._group_of("decode", "a group")
    with pytest.raises(ModelInvalid, match="a group that holds this rank"):
        exchange._group_of("decode", dist.GroupMember.NON_GROUP_MEMBER)
    monkeypatch.setattr(dist, "get_rank", lambda: 7)
    group = exchange._group_of("decode", "a group")
    assert (group.ranks, group.rank) == ((4, 7), 1)
