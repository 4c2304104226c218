"""The communicator of one sequence group: uneven all-to-all and sum, in flight while the caller computes.

It is a communicator of its own, so that nothing another library sends on the job's groups comes between. CUDA tensors
travel on a stream of NCCL's, and a wait orders the current stream after it; the host waits for nothing. CPU tensors
travel through gloo.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wanshim.core.ranks import nccl
from wanshim.core.ranks.group import Group
from wanshim.core.ranks.watch import ALONE_SECONDS, Watch, WatchedByAnother
from wanshim.core.shared.forks import Owner
from wanshim.core.shared.text import first_line
from wanshim.errors import ModelInvalid, RanksFailed

_POLL_SECONDS = 0.0002
_made: Counter[tuple[int, ...]] = Counter()  # groups made per set of ranks: the n-th on one rank is the n-th on another


class _Flight:
    """The exchange as the watching thread sees it. It holds no work: a work holds its tensors."""

    __slots__ = ("begun", "is_over", "step")

    def __init__(self, is_over: Callable[[], bool], step: str) -> None:
        self.is_over, self.step, self.begun = is_over, step, time.monotonic()


class InFlight:
    """Tensors on their way. Until `wait()` returns their memory holds nothing of use."""

    def __init__(
        self,
        group: SequenceGroup,
        work: Any,
        flight: _Flight,
        keep: Any,
        landed: Callable[[], None] | None = None,
    ) -> None:
        self._group, self._work, self._flight, self._keep, self._landed = group, work, flight, keep, landed

    def wait(self) -> None:
        """Order the current stream after the arrival (CUDA), or wait for it (CPU). Does nothing a second time."""
        if self._work is None:
            return
        work, self._work = self._work, None
        self._group.complete(work)
        self._flight.is_over = self._group.mark()
        if self._landed is not None:
            self._landed()
        self._keep = self._landed = None


class SequenceGroup:
    """The ranks over which one sample is sharded; this process is `rank` of `ranks` (global ranks).

    Args:
        group: the ranks, with a store for this group alone.
        deadline: seconds that any wait may take.
        watched: what sees the other ranks fail; or the same group by a store's connection of its own, through which the
            ranks watch each other.
        over_nccl: whether CUDA tensors travel over NCCL; else, between processes that share a GPU, through the host.
    """

    def __init__(
        self, group: Group, deadline: float, *, watched: Group | WatchedByAnother, over_nccl: bool = True
    ) -> None:
        self._owner = Owner("a sequence group")
        self._group, self.store, self.deadline = group, group.store, deadline
        self.ranks, self.rank, self.size = group.ranks, group.rank, group.size
        self._over_nccl = over_nccl
        self._peers: Any = None
        self._aborting: threading.Thread | None = None
        self._connections = self._gathered = 0
        self._closed = False
        self._device: torch.device | None = None
        self._in_flight: deque[_Flight] = deque()
        self.watch: Watch | WatchedByAnother = (
            Watch(watched, deadline, overdue=self._overdue, abort=self._abort)
            if isinstance(watched, Group)
            else watched
        )

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, deadline: float) -> SequenceGroup:
        """The ranks of a group of torch.distributed; None: all ranks."""
        ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        _made[ranks] += 1
        name = f"wanshim/sequence/{_made[ranks]}"
        mine, watched = (Group.of_job(group, name=name, own=True) for _ in range(2))
        return cls(mine, deadline, watched=watched)

    def start(self, model: Mapping[str, Any]) -> None:
        """Meet the other ranks; `model` must be the same on all of them. See `Watch.start` for what it raises."""
        assert isinstance(self.watch, Watch)
        self.watch.start(model)

    def exchange(
        self,
        sends: Sequence[torch.Tensor | None],
        receives: Sequence[torch.Tensor | None],
        landed: Callable[[], None] | None = None,
    ) -> InFlight:
        """Send one contiguous tensor to each rank and receive one from each; this rank's own places hold None.

        Args:
            landed: called by `InFlight.wait()` once the received tensors can be read.
        """
        peers = self._connected(next(t for t in sends if t is not None).device)
        try:
            if self._on_cuda:
                nothing = next(t for t in sends if t is not None).new_empty(0)
                outgoing = [nothing if t is None else t.view(-1) for t in sends]
                incoming = [nothing if t is None else t.view(-1) for t in receives]
                return self._sent(peers.alltoall(incoming, outgoing), outgoing, landed)
            return self._exchange_bytes(peers, sends, receives, landed)
        except RuntimeError as error:
            raise self._stopped(error) from error

    def sum(self, tensor: torch.Tensor) -> InFlight:
        """Add up a contiguous tensor over the ranks, in place."""
        peers = self._connected(tensor.device)
        try:
            return self._sent(peers.allreduce([tensor]), tensor, None)
        except RuntimeError as error:
            raise self._stopped(error) from error

    def gather(self, mine: torch.Tensor, counts: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of every rank, (sum(counts), ...), from this rank's `mine`, (counts[rank], ...), contiguous."""
        if out is None:
            out = mine.new_empty((sum(counts), *mine.shape[1:]))
        self.start_gather(mine, counts, out).wait()
        return out

    def start_gather(self, mine: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> InFlight:
        """As `gather`, but the rows of other ranks are in `out` when the result has been awaited."""
        places = list(out.split(list(counts)))
        places[self.rank].copy_(mine)
        others = [rank != self.rank for rank in range(self.size)]
        sends = [mine if other else None for other in others]
        return self.exchange(sends, [p if other else None for p, other in zip(places, others, strict=True)])

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the first rank's on every rank; the others' is contiguous, and filled in place."""
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        nothing = [None if rank == self.rank else data.new_empty(0) for rank in range(self.size)]
        if self.rank == 0:
            self.exchange([None, *[data] * (self.size - 1)], nothing).wait()
        else:
            self.exchange(nothing, [data, *nothing[1:]]).wait()
        return tensor

    def publish(self, key: str, text: str) -> None:
        """Have the other ranks read `text`, each once, with `published`."""
        self.watch.check()
        self.store.set(key, text)

    def published(self, key: str, step: str) -> str:
        """The value that another rank publishes under `key`; the last reader clears it away."""
        before = self.watch.step
        self.watch.at(step)
        self.poll(lambda: self.store.check([key]), interval=0.002)
        text = self.store.get(key).decode()
        if self.store.add(f"{key}/readers", 1) == self.size - 1:
            self.store.delete_key(key)
            self.store.delete_key(f"{key}/readers")
        self.watch.at(before)
        return text

    def gather_text(self, key: str, text: str) -> list[str]:
        """The text of every rank, in rank order. A rank may come to the next call before others have read this one."""
        self._gathered += 1
        place = f"{key}/{self._gathered}"
        self.publish(f"{place}/{self.rank}", text)
        return [
            text if rank == self.rank else self.published(f"{place}/{rank}", f"{key} of rank {self.ranks[rank]}")
            for rank in range(self.size)
        ]

    def complete(self, work: Any) -> None:
        """Wait for one work: on the stream (CUDA) or on the host, within the deadline (CPU)."""
        try:
            if not self._on_cuda:
                self.poll(work.is_completed)
            work.wait()
        except RuntimeError as error:
            raise self._stopped(error) from error

    def mark(self) -> Callable[[], bool]:
        """Whether the device has come to what the current stream does next."""
        if not self._on_cuda:
            return lambda: True
        event = torch.cuda.Event()
        event.record()
        return event.query

    def poll(self, ready: Callable[[], bool], interval: float = _POLL_SECONDS, seconds: float | None = None) -> None:
        """Wait on the host until `ready()`, at most for the deadline or so many seconds, and raise what stops the group
        meanwhile."""
        limit = self.deadline if seconds is None else seconds
        begun = time.monotonic()
        while not ready():
            self.watch.check()
            if time.monotonic() > max(begun, self.watch.held_at) + limit:
                self.watch.fail("waited", f"nothing within {limit:g} s in {self.watch.step}")
            time.sleep(interval)

    def disconnect(self) -> None:
        """Close the connections on every rank, once all have come and nothing is in flight. The next exchange connects
        anew, on any device."""
        self.gather_text("disconnecting", "")
        self._leave_peers()

    def close(self) -> None:
        """Leave the group. Peers that still wait for this rank wake with an error. Safe to call twice."""
        if not self._owner.is_here:
            return
        self._closed = True
        self.watch.stop()
        self._leave_peers()

    def abort(self, cause: str) -> None:
        """Wake whoever waits for the group in this process, with an error. Any thread may call it."""
        self.watch.fail("gone", cause)
        self._abort()

    def check_open(self) -> None:
        """Raises:
        ModelInvalid: this rank has left the group.
        """
        if self._closed:
            raise ModelInvalid(
                "a backward pass through a model that is no longer sharded",
                expected="remove() after the backward pass of every forward pass",
                hint="Call the model again for a new loss",
            )

    def _leave_peers(self) -> None:
        idle = self._on_cuda and not self.watch.failed
        peers, self._peers, self._device = self._peers, None, None
        if peers is not None:
            nccl.abort(peers, idle=idle)

    @property
    def _on_cuda(self) -> bool:
        """Whether tensors travel in the order of CUDA streams."""
        return self._over_nccl and self._device is not None and self._device.type == "cuda"

    def _exchange_bytes(
        self,
        peers: Any,
        sends: Sequence[torch.Tensor | None],
        receives: Sequence[torch.Tensor | None],
        landed: Callable[[], None] | None,
    ) -> InFlight:
        """gloo takes one buffer on the host each way, and not every dtype."""
        outgoing = [None if t is None else t.detach().reshape(-1).view(torch.uint8) for t in sends]
        counts_out = [0 if t is None else t.numel() for t in outgoing]
        counts_in = [0 if t is None else t.numel() * t.element_size() for t in receives]
        packed = torch.cat([t for t in outgoing if t is not None]).cpu()
        buffer = torch.empty(sum(counts_in), dtype=torch.uint8)

        def unpack() -> None:
            for place, piece in zip(receives, buffer.split(counts_in), strict=True):
                if place is not None:
                    place.copy_(piece.view(place.dtype).view(place.shape))
            if landed is not None:
                landed()

        return self._sent(peers.alltoall_base(buffer, packed, counts_in, counts_out), packed, unpack)

    def _sent(self, work: Any, keep: Any, landed: Callable[[], None] | None) -> InFlight:
        flight = _Flight(work.is_completed, self.watch.step)
        self._in_flight.append(flight)
        return InFlight(self, work, flight, keep, landed)

    def _connected(self, device: torch.device) -> Any:
        self._owner.check()
        self.check_open()
        self.watch.check()
        if self._peers is None:
            self._device = device
            limit = timedelta(seconds=self.deadline)
            self._connections += 1
            self.watch.at("connecting")
            over = device if self._on_cuda else torch.device("cpu")
            try:
                self._peers = self._group.connect(
                    f"peers/{self._connections}",
                    over,
                    limit,
                    self,
                    wait=lambda keys: self.poll(lambda: self.store.check(keys), interval=0.005),
                    high_priority=True,
                )
                if not self._on_cuda:
                    # an exchange waits for a rank that computes alone; a connection, for one that may have given up
                    self._peers._set_default_timeout(limit + timedelta(seconds=ALONE_SECONDS))
            except RuntimeError as error:
                raise self._stopped(error) from error
        if device != self._device:
            raise ModelInvalid(
                f"tensors on {device} in a group that began on {self._device}",
                hint="Call remove() before the model moves, and shard_sequence() after",
            )
        return self._peers

    def _stopped(self, error: RuntimeError) -> BaseException:
        """An exchange failed here: what stopped the group is known a moment later, from whoever failed first."""
        if isinstance(error, RanksFailed):
            return error
        self.watch.fail("connection", f"{self.watch.step}: {first_line(error)}")
        return self.watch.cause()

    def _overdue(self) -> str | None:
        while self._in_flight:
            flight = self._in_flight[0]
            try:
                over = flight.is_over()
            except RuntimeError:
                over = True  # whoever waits for it reports it
            if not over:
                since = max(flight.begun, self.watch.held_at)
                return flight.step if time.monotonic() - since > self.deadline else None
            self._in_flight.popleft()
        return None

    def _abort(self) -> None:
        peers = self._peers  # which another thread may close meanwhile
        if peers is not None and not (self._aborting and self._aborting.is_alive()):
            self._aborting = nccl.abort(peers)
