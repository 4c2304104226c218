"""How the ranks of one decode talk: agreement before, point-to-point traffic during, one verdict after.

Point-to-point traffic runs on a backend of its own, because P2P and collectives on one NCCL communicator have
corrupted halos elsewhere (vLLM-Omni issue 6396). Agreement and verdicts go through the store that torch.distributed
already keeps: small, on the CPU, and readable while a peer hangs. Every wait has a deadline.

A rank that fails closes its connections. Peers that wait for its data wake with an error at once (gloo) or when they
look at the verdicts (NCCL), leave their own verdict, and all ranks raise the same `DecodeFailed`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from wanshim.core.shared import nccl
from wanshim.core.shared.forks import Owner, refuse_inherited_group
from wanshim.errors import DecodeFailed

_POLL_SECONDS = 0.0005
_LOOK_SECONDS = 0.2
_EXCHANGES_AHEAD = 4  # the host never fills the launch queue behind a stuck exchange: it could not look up any more
_made: Counter[str] = Counter()  # decoders made per set of ranks: the n-th on one rank speaks with the n-th on another


class PeerLost(Exception):
    """A wait ended without its data: a peer failed, died or is late. `step` says what was awaited."""

    def __init__(self, step: str, cause: str) -> None:
        super().__init__(f"waiting in step {step!r}: {cause}")
        self.step = step


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one rank left a decode. `kind`: done, oom, error, peer (only a peer's failure reached it), lost."""

    rank: int
    kind: str
    text: str = ""


class Comm:
    """The ranks of one decoder: `rank` of `size`, in the order of `group`. Without torch.distributed: one rank.

    Args:
        group: the framework's group, of which only the ranks are used; None: all ranks.
        deadline: seconds in which a failing decode ends on every rank; any one wait takes less.
        device: where tensors to be sent live; NCCL for CUDA, gloo for the CPU.
    """

    def __init__(self, group: dist.ProcessGroup | None, deadline: float, device: torch.device) -> None:
        refuse_inherited_group()
        self._owner = Owner("a parallel decoder")
        self.deadline = deadline
        self.device = device
        self.step = "start"
        self.ranks, self.rank, self._store = [0], 0, None
        self._calls = self._epoch = 0
        self._peers: Any = None
        self._ahead = 0
        self._event: torch.cuda.Event | None = None
        if dist.is_available() and dist.is_initialized():
            self.ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            self.rank = self.ranks.index(dist.get_rank())
            name = "-".join(str(rank) for rank in self.ranks)
            _made[name] += 1
            self._store = dist.PrefixStore(f"wanshim/decode/{name}/{_made[name]}", _default_store())

    @property
    def size(self) -> int:
        return len(self.ranks)

    # Agreement and verdict

    def begin(self) -> None:
        """A new call: its keys are its own, and those of the call before the last are forgotten."""
        self._owner.check()
        self._calls += 1
        if self._store is None or self.size == 1:
            return
        for topic in ("agree", "verdict", "left"):
            with contextlib.suppress(RuntimeError, OSError):
                self._store.delete_key(f"{self._calls - 2}/{topic}/{self.rank}")

    def share(self, topic: str, mine: dict[str, Any], patience: float | None = None) -> list[dict[str, Any] | None]:
        """What every rank says on `topic` (JSON), in rank order; None for a rank silent past `patience` seconds."""
        if self._store is None or self.size == 1:
            return [mine]
        try:
            self._store.set(f"{self._calls}/{topic}/{self.rank}", json.dumps(mine, sort_keys=True))
        except (RuntimeError, OSError) as error:
            raise DecodeFailed(
                f"rank {self.rank} cannot reach the store of torch.distributed: {_line(error)}",
                expected="the process that hosts it, rank 0 of the job, to be alive",
                hint="Look for the first rank that died and restart the job",
            ) from error
        end = time.monotonic() + (self.deadline if patience is None else patience)
        return [mine if rank == self.rank else self._hear(topic, rank, end) for rank in range(self.size)]

    def conclude(self, verdict: Verdict) -> list[Verdict]:
        """Exchange verdicts; a rank that leaves none in time counts as lost. Who waited already waits less."""
        patience = self.deadline * (0.2 if verdict.kind == "peer" else 1.0)
        heard = self.share("verdict", {"rank": self.rank, "kind": verdict.kind, "text": verdict.text}, patience)
        self._leave(heard)
        return [
            Verdict(**said) if said else Verdict(rank=rank, kind="lost", text=f"no answer within {patience:g} s")
            for rank, said in enumerate(heard)
        ]

    def _leave(self, heard: list[dict[str, Any] | None]) -> None:
        """The job's first rank may host the store: it stays until those who answered have read the verdicts."""
        if self._store is None or self.size == 1:
            return
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"{self._calls}/left/{self.rank}", "1")
            if self.ranks[self.rank] == 0:
                present = [rank for rank, said in enumerate(heard) if said is not None]
                self._store.wait([f"{self._calls}/left/{rank}" for rank in present], timedelta(seconds=2))

    def _hear(self, topic: str, rank: int, end: float) -> dict[str, Any] | None:
        assert self._store is not None
        key = f"{self._calls}/{topic}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=max(end - time.monotonic(), 0.01)))
            said = json.loads(self._store.get(key))
        except (RuntimeError, OSError, ValueError):
            return None
        return said if isinstance(said, dict) else None

    # Point to point

    def connect(self) -> None:
        """Open the point-to-point connections if they are closed; every rank of this decoder must call it."""
        if self._peers is not None or self._store is None or self.size == 1:
            return
        self._epoch += 1
        store = dist.PrefixStore(f"p2p/{self._epoch}", self._store)
        self.step = "connect"
        try:
            if self.device.type == "cuda":
                self._peers = nccl.connect(store, self.rank, self.size, self.device, self._wait_limit())
            else:
                self._peers = dist.ProcessGroupGloo(store, self.rank, self.size, self._wait_limit())
        except RuntimeError as error:
            raise PeerLost("connect", _line(error)) from error

    def close(self, *, idle: bool = False) -> None:
        """Close the connections: peers that wait for this rank wake. The next `connect` opens new ones.

        Args:
            idle: nothing is under way, and no peer waits.
        """
        peers, self._peers, self._event = self._peers, None, None
        if peers is None:
            return
        if idle and self.device.type == "cuda":
            time.sleep(nccl.WATCHDOG_SECONDS)
        with contextlib.suppress(Exception):  # whatever state it is in, it is being given up
            peers.abort()
        with contextlib.suppress(Exception):
            peers.shutdown()

    def exchange(
        self, step: str, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """Send and receive (tensor, peer) pairs; on return all are done, or ordered on the stream.

        Tensors must be dense in memory, in the same order at both ends.
        """
        if not sends and not receives:
            return
        self.step = step
        if self._peers is None:
            raise PeerLost(step, "the connections are closed")
        try:
            if self.device.type == "cuda":
                self._exchange_on_stream(sends, receives)
            else:
                self._exchange_on_host(sends, receives)
        except RuntimeError as error:
            raise PeerLost(step, _line(error)) from error

    def _exchange_on_stream(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        self._peers._start_coalescing()
        for tensor, peer in sends:
            self._peers.send([in_memory_order(tensor)], peer, 0)
        for tensor, peer in receives:
            self._peers.recv([in_memory_order(tensor)], peer, 0)
        self._peers._end_coalescing().wait()  # orders the stream; `checkpoint` bounds it
        self._ahead += 1
        if self._ahead >= _EXCHANGES_AHEAD:
            self.checkpoint()

    def _exchange_on_host(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        works = [self._peers.send([in_memory_order(tensor)], peer, 0) for tensor, peer in sends]
        works += [self._peers.recv([in_memory_order(tensor)], peer, 0) for tensor, peer in receives]
        for work in works:
            work.wait(self._wait_limit())

    def checkpoint(self, *, drain: bool = False) -> None:
        """Bound what runs on the GPU: wait, with the deadline, for the checkpoint before (`drain`: for this one)."""
        if self.device.type != "cuda" or self.size == 1:
            return
        self._ahead = 0
        event = torch.cuda.Event()
        event.record()
        awaited, self._event = (event, None) if drain else (self._event, event)
        if awaited is not None:
            self._poll(awaited.query)

    def _poll(self, ready: Callable[[], bool]) -> None:
        start = look = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now - start > self._wait_limit().total_seconds():
                raise PeerLost(self.step, f"nothing within {self._wait_limit().total_seconds():g} s")
            if now - look > _LOOK_SECONDS:
                look = now
                if self._peer_failed():
                    raise PeerLost(self.step, "a peer failed")
            time.sleep(_POLL_SECONDS)

    def _peer_failed(self) -> bool:
        """Has another rank left a verdict other than done?"""
        assert self._store is not None
        for rank in range(self.size):
            key = f"{self._calls}/verdict/{rank}"
            said = rank != self.rank and self._store.check([key])
            if said and json.loads(self._store.get(key)).get("kind") != "done":
                return True
        return False

    def _wait_limit(self) -> timedelta:
        """One wait, so that the wait and the verdicts after it end inside the deadline."""
        return timedelta(seconds=0.75 * self.deadline)


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a contiguous tensor: backends take no channels-last buffers."""
    if x.is_contiguous():
        return x
    y = x.permute(0, 2, 3, 4, 1)
    if not y.is_contiguous():
        raise ValueError(f"a buffer of shape {tuple(x.shape)} and strides {x.stride()} has gaps; it must be packed")
    return y


def packed(x: torch.Tensor) -> torch.Tensor:
    """`x` if its memory is dense, else a dense copy; channels last stays channels last."""
    if x.dim() == 5 and x.stride(1) == 1:
        return x.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    return x.contiguous()


def landing(room: torch.Tensor) -> torch.Tensor:
    """Where to receive what belongs into `room`: the room itself where its memory is dense, else a dense buffer."""
    if room.dim() == 5 and room.stride(1) == 1:
        view = room.permute(0, 2, 3, 4, 1)
        if view.is_contiguous():
            return room
        return torch.empty(view.shape, dtype=view.dtype, device=view.device).permute(0, 4, 1, 2, 3)
    return room if room.is_contiguous() else torch.empty(room.shape, dtype=room.dtype, device=room.device)


def _line(error: BaseException) -> str:
    """The first line of a message, without the C++ trace behind it."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _default_store() -> dist.Store:
    """The store of the default group: torch keeps it, but names no public way to it."""
    store = dist.distributed_c10d._get_default_store()
    assert isinstance(store, dist.Store)
    return store
