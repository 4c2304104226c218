"""The traffic between the ranks of one decode or encode: a rendezvous before, point-to-point traffic during, one
verdict after.

Point-to-point traffic runs on a backend of its own, because P2P and collectives on one NCCL communicator have
corrupted halos elsewhere (vLLM-Omni issue 6396). Rendezvous and verdicts go through the store that torch.distributed
already keeps: small, on the CPU, and readable while a peer hangs. Every wait has a deadline.

Nothing is counted on one rank alone. All decoders of the same ranks share one sequence of rounds, whose number the
store holds; verdicts and connections carry the number of their round. Connections stay open between decodes; where a
rank comes without the ones that the others hold, all open new ones.

A rank that fails closes its connections. Peers that wait for its data wake with an error at once (gloo) or when they
look at the verdicts (NCCL), leave their own verdict, and all ranks raise the same `RanksFailed`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from wanshim.core.decoding.operators.layout import dense
from wanshim.core.ranks import nccl
from wanshim.core.ranks.group import KEPT_ROUNDS, Group
from wanshim.core.ranks.store import READ, stay_until_read, wait_for
from wanshim.core.shared.forks import Owner
from wanshim.core.shared.text import first_line
from wanshim.errors import ModelInvalid, RanksFailed

_POLL_SECONDS = 0.0005
_LOOK_SECONDS = 0.2
_EXCHANGES_AHEAD = 4  # the host never fills the launch queue behind a stuck exchange: it could not look up any more
_locks = defaultdict[tuple[int, ...], threading.Lock](threading.Lock)  # one call at a time per set of ranks


class PeerLost(Exception):
    """A wait ended without its data: a peer failed, died or is late. `step` says what was awaited."""

    def __init__(self, step: str, cause: str) -> None:
        super().__init__(f"waiting in step {step!r}: {cause}")
        self.step = step


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a decode on one rank.

    `kind`: done, unequal (done, but the result is not the framework's own), oom, error, stopped (by an interrupt, or
    when a callback had frames already), peer (only a peer's failure reached it), lost.
    """

    rank: int
    kind: str
    text: str = ""


class Comm:
    """The ranks of one VAE: `rank` of `size`, in the order of `group`. Without torch.distributed: one rank.

    Decodes and encodes of the same ranks share one sequence of rounds: who decodes while others encode is found out.

    Args:
        verb: decode or encode.
        group: the ranks; or the framework's group, of which only the ranks are used; None: all ranks.
        deadline: seconds in which a failing decode ends on every rank; any one wait takes less.
        device: where tensors to be sent live; NCCL for CUDA, gloo for the CPU.
    """

    def __init__(
        self, verb: str, group: dist.ProcessGroup | Group | None, deadline: float, device: torch.device
    ) -> None:
        self._owner = Owner(f"a parallel {verb}r")
        self.verb = verb
        self.deadline = deadline
        self.device = device
        self.step = "start"
        self._group = group if isinstance(group, Group) else _group_of(verb, group)
        self.ranks, self.rank, self.size = list(self._group.ranks), self._group.rank, self._group.size
        self._store = self._group.store
        self._lock = threading.Lock() if self._store is None else _locks[self._group.ranks]
        self._round = self._attempt = 0
        self._left_keys: deque[list[str]] = deque([[]])  # what this rank left in the store, per round
        self._peers: Any = None
        self._link: str | None = None  # names the open connections: the same on all ranks that hold their ends
        self._ahead = 0
        self._event: torch.cuda.Event | None = None

    # Rendezvous and verdict

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold off this process's other threads that use the same ranks: they would join one round twice."""
        if self._owner.pid != os.getpid():
            self._owner.check()
        if not self._lock.acquire(timeout=self.deadline):
            raise RanksFailed(
                f"another thread of rank {self.ranks[self.rank]} has been at it for {self.deadline:g} s",
                expected="one decode or encode at a time with the same ranks",
                hint=f"{self.verb.capitalize()} in one thread, or raise the deadline",
            )
        try:
            yield
        finally:
            self._lock.release()

    def meet(self, mine: dict[str, Any], patience: float | None = None) -> list[dict[str, Any]]:
        """Wait until all ranks call, and return the request of each (JSON), in rank order.

        Args:
            patience: seconds to wait; None: the deadline.

        Raises:
            RankAbsent: not all ranks came in that time.
        """
        patience = self.deadline if patience is None else patience
        if self.size == 1:
            return [mine]
        self._attempt = 0
        meeting = self._group.meet("call", {"request": mine, "link": self._link}, patience, self.verb)
        self._round = meeting.number
        self._left_keys.append([])
        while len(self._left_keys) > KEPT_ROUNDS:
            self._forget(self._left_keys.popleft())
        if any(reply["link"] != self._link for reply in meeting.replies):
            self.close(idle=True)
        return [reply["request"] for reply in meeting.replies]

    def next_attempt(self) -> None:
        """Go on to the next plan of this round, on all ranks."""
        self._attempt += 1

    def conclude(self, verdict: Verdict) -> list[Verdict]:
        """Exchange verdicts; a rank that leaves none in time counts as lost. Who waited already waits less."""
        if self.size == 1:
            return [verdict]
        patience = self.deadline * (0.2 if verdict.kind == "peer" else 1.0)
        self._leave("verdict", json.dumps({"rank": verdict.rank, "kind": verdict.kind, "text": verdict.text}))
        end = time.monotonic() + patience
        verdicts = [verdict if rank == self.rank else self._verdict_of(rank, end) for rank in range(self.size)]
        present = sum(each is not None for each in verdicts)
        attempt = f"{self._round}.{self._attempt}"
        stay_until_read(self._store, attempt, present, host=self.ranks[self.rank] == 0)
        self._left_keys[-1] += [f"{attempt}/{name}" for name in READ]
        return [
            each or Verdict(rank=rank, kind="lost", text=f"no answer within {patience:g} s")
            for rank, each in enumerate(verdicts)
        ]

    def _verdict_of(self, rank: int, end: float) -> Verdict | None:
        key = self._key("verdict", rank)
        try:
            if not wait_for(self._store, [key], end - time.monotonic()):
                return None
            return Verdict(**json.loads(self._store.get(key)))
        except (RuntimeError, OSError, ValueError):
            return None

    def _leave(self, topic: str, text: str) -> None:
        """Leave `text` for the other ranks of this attempt."""
        key = self._key(topic, self.rank)
        try:
            self._store.set(key, text)
        except (RuntimeError, OSError) as error:
            raise self._group.without_store(error) from error
        self._left_keys[-1].append(key)

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._round}.{self._attempt}/{topic}/{rank}"

    def _forget(self, keys: list[str]) -> None:
        for key in keys:
            with contextlib.suppress(RuntimeError, OSError):
                self._store.delete_key(key)

    # Point to point

    def connect(self) -> None:
        """Open the point-to-point connections if they are closed; every rank must call it."""
        if self._peers is not None or self.size == 1:
            return
        link, limit = f"{self._round}.{self._attempt}", self._wait_limit()
        self.step = "connect"
        try:
            wait = partial(self._store.wait, limit=limit) if self._group.is_local else None
            self._peers = self._group.connect(f"p2p/{link}", self.device, limit, self, wait=wait)
        except RuntimeError as error:
            raise PeerLost("connect", first_line(error)) from error
        self._link = link

    def move_to(self, device: torch.device) -> None:
        """Send tensors of `device` from now on: connections are of one."""
        if device != self.device:
            self.close(idle=True)
            self.device = device

    def abandon(self) -> None:
        """Wake this rank where it waits for another one, which is gone. Any thread may call it; the ranks of a
        `LocalStore` alone have somebody who knows."""
        if self._group.is_local:
            self._store.gone.set()
        self.close()

    def close(self, *, idle: bool = False) -> None:
        """Close the connections: peers that wait for this rank wake. The next `connect` opens new ones.

        Args:
            idle: nothing is under way, and no peer waits.
        """
        peers, self._peers, self._event, self._link = self._peers, None, None, None
        if peers is None:
            return
        nccl.abort(peers, idle=idle and self.device.type == "cuda")

    def exchange(
        self, step: str, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """Send and receive (tensor, peer) pairs; on return all are done, or ordered on the stream.

        Tensors must be dense in memory, in the same order at both ends.
        """
        self.begin(step, sends, receives)()

    def begin(
        self, step: str, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Callable[[], None]:
        """Start an `exchange`, and return what completes it. Until then no tensor of it may be written or freed.

        All ranks start the exchanges of one pair of ranks in the same order.
        """
        if not sends and not receives:
            return lambda: None
        with self._waiting_in(step):
            begin = self._begin_on_stream if self.device.type == "cuda" else self._begin_on_host
            wait = begin(sends, receives)

        def complete() -> None:
            with self._waiting_in(step):
                wait()

        return complete

    @contextlib.contextmanager
    def _waiting_in(self, step: str) -> Iterator[None]:
        self.step = step
        if self._peers is None:
            raise PeerLost(step, "the connections are closed")
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(step, first_line(error)) from error

    def _begin_on_stream(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Callable[[], None]:
        self._peers._start_coalescing()
        for tensor, peer in sends:
            self._peers.send([in_memory_order(tensor)], peer, 0)
        for tensor, peer in receives:
            self._peers.recv([in_memory_order(tensor)], peer, 0)
        work = self._peers._end_coalescing()

        def wait() -> None:
            work.wait()  # orders the stream; `checkpoint` bounds it
            self._ahead += 1
            if self._ahead >= _EXCHANGES_AHEAD:
                self.checkpoint()

        return wait

    def _begin_on_host(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Callable[[], None]:
        works = [self._peers.send([in_memory_order(tensor)], peer, 0) for tensor, peer in sends]
        works += [self._peers.recv([in_memory_order(tensor)], peer, 0) for tensor, peer in receives]

        def wait() -> None:
            for work in works:
                work.wait(self._wait_limit())

        return wait

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
        """Has another rank left the verdict that it is not done?"""
        for rank in range(self.size):
            key = self._key("verdict", rank)
            left = rank != self.rank and self._store.check([key])
            if left and json.loads(self._store.get(key)).get("kind") not in ("done", "unequal"):
                return True
        return False

    def _wait_limit(self) -> timedelta:
        """One wait, so that the wait and the verdicts after it end inside the deadline."""
        return timedelta(seconds=0.75 * self.deadline)


def begin_swap(
    comm: Comm, step: str, sends: Sequence[tuple[torch.Tensor, int]], targets: Sequence[tuple[torch.Tensor, int]]
) -> Callable[[], None]:
    """Start to send parts of windows and to fill others; they are filled when what this returns was called.

    The ranks may hold them in different layouts.
    """
    dense_sends = [(packed(part), peer) for part, peer in sends]
    buffers = [(receive_buffer(target), peer) for target, peer in targets]
    complete = comm.begin(step, dense_sends, buffers)

    def fill() -> None:
        complete()
        for (target, _), (buffer, _) in zip(targets, buffers):
            if buffer is not target:
                target.copy_(buffer)
        dense_sends.clear()  # not before: what is under way must not be freed

    return fill


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a contiguous tensor: backends take no channels-last buffers."""
    if x.is_contiguous():
        return x
    y = x.permute(0, 2, 3, 4, 1)
    if not y.is_contiguous():
        raise ValueError(f"a buffer of shape {tuple(x.shape)} and strides {x.stride()} has gaps; it must be packed")
    return y


def packed(x: torch.Tensor) -> torch.Tensor:
    """[B, C, T, H, W] channels last and dense, as all ranks send windows however they hold them; `x` if it lies so."""
    return x.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)


def receive_buffer(target: torch.Tensor) -> torch.Tensor:
    """A buffer for what `packed` sends: `target` where it lies so, else a tensor to copy from."""
    return target if target.permute(0, 2, 3, 4, 1).is_contiguous() else dense(tuple(target.shape), target)


def _group_of(verb: str, group: Any) -> Group:
    """The ranks of torch.distributed's `group`, and their place in its store."""
    if not dist.is_available() or not dist.is_initialized():
        return Group()
    mine = dist.get_rank()
    ranks = (
        [] if group is dist.GroupMember.NON_GROUP_MEMBER else dist.get_process_group_ranks(group or dist.group.WORLD)
    )
    if mine not in ranks:
        raise ModelInvalid(
            f"rank {mine} is not in the group that {verb}s",
            expected=f"one of ranks {', '.join(map(str, ranks))}" if ranks else "a group that holds this rank",
            hint=f"Call parallelize_{verb} and {verb} only on the ranks of the group",
        )
    return Group.of_job(group, name="wanshim/decode")
