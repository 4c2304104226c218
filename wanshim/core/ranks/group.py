"""Ranks that share a store: what each brings to a meeting, and connections between them.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from wanshim.core.shared.text import first_line, named_line
from wanshim.errors import RanksFailed

from .rendezvous import FIRST_ERROR, Rendezvous, Round
from .store import LocalStore, default_store

_LOOPBACK = "127.0.0.1"
_LOCAL_LIMIT = timedelta(seconds=30)  # for processes of one machine to connect by gloo: all have come


class Group:
    """Ranks of a job, or processes of one machine. This process is `rank` of `size`; without a store it meets nobody.

    Args:
        ranks: the job's number of each, in the group's order; for messages.
        rank: this process's place among them.
        store: of torch.distributed, which all of them reach. A `LocalStore` is one machine's: connections bind no
            address that another machine reaches.
    """

    def __init__(self, ranks: Sequence[int] = (0,), rank: int = 0, store: Any = None) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.store = store

    @classmethod
    def of_job(cls, group: Any = None, *, name: str = "", own: bool = False) -> Group:
        """The ranks of a process group, which this process is one of; this process alone where there is none.

        Args:
            group: of torch.distributed; None: all ranks.
            name: the keys of these ranks in the store begin with it.
            own: reach the store through another connection: a wait in one holds up every thread that shares it.

        Raises:
            WanshimError: the default process group is that of the process that this one was forked from.
        """
        import torch.distributed as dist

        store = default_store()
        if store is None:
            return cls()
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        if own and len(ranks) > 1:
            store = store.clone()
        if name:
            store = dist.PrefixStore(f"{name}/{'-'.join(map(str, ranks))}", store)
        return cls(ranks, ranks.index(dist.get_rank()), store)

    @classmethod
    def of_file(cls, file: int, name: str, ranks: Sequence[int], rank: int) -> Group:
        """Processes of this machine that alone have a file without a name.

        Args:
            file: its descriptor.
            name: their keys in the store begin with it.
            rank: this process's number, one of `ranks`.
        """
        import torch.distributed as dist

        store = dist.PrefixStore(name, dist.FileStore(f"/proc/self/fd/{file}", -1))
        return cls(ranks, ranks.index(rank), LocalStore(store))

    @property
    def is_local(self) -> bool:
        return isinstance(self.store, LocalStore)

    def meet(self, topic: str, mine: Any, seconds: float, call: str) -> Round:
        """The round in which all ranks come to `topic`, with what each brings.

        Args:
            mine: this rank's, as JSON.
            seconds: to wait for the others.
            call: in which they come, for messages.

        Raises:
            RankAbsent: not all ranks came.
            RanksFailed: a rank ended the topic by `fail`, or the store cannot be reached.
        """
        try:
            return Rendezvous(self.store, topic, self.ranks, self.rank).meet(mine, seconds, call)
        except RanksFailed:
            raise
        except (RuntimeError, OSError) as error:
            raise self.without_store(error) from error

    def gather(self, topic: str, mine: Any, seconds: float, call: str, error: BaseException | None = None) -> list[Any]:
        """The values that the ranks bring to `topic`, in rank order: see `meet`. A rank alone waits for nobody.

        Args:
            error: of this rank, which brings it in place of a value.

        Raises:
            RanksFailed: a rank brought an error; on the ranks without one.
        """
        if self.size == 1 or self.store is None:
            return [mine]
        brought = {"value": mine} if error is None else {"error": named_line(error)}
        replies = self.meet(topic, brought, seconds, call).replies
        failed = [
            f"rank {rank}: {reply['error']}"
            for rank, reply in zip(self.ranks, replies, strict=True)
            if "error" in reply
        ]
        if failed and error is None:
            raise RanksFailed(f"{call} failed on {'; '.join(failed)}", hint=FIRST_ERROR)
        return [reply.get("value") for reply in replies]

    @contextmanager
    def failing_together(self, topic: str, seconds: float, call: str) -> Iterator[None]:
        """An error of the body reaches the other ranks where they gather next on `topic`."""
        try:
            yield
        except RanksFailed:  # the others have it
            raise
        except Exception as error:
            with suppress(RanksFailed):
                self.gather(topic, None, seconds, call, error)
            raise

    def fail(self, topic: str, error: BaseException) -> None:
        """End the meetings of a topic for good: who waits there, or comes later, raises `RanksFailed` with the first
        error. Waits for nobody."""
        if self.store is not None:
            with suppress(RuntimeError, OSError):  # the store may be gone; what counts is the error that came first
                failed = f"rank {self.ranks[self.rank]} failed: {named_line(error)}"
                Rendezvous(self.store, topic, self.ranks, self.rank).fail(failed)

    def without_store(self, error: Exception) -> RanksFailed:
        """The error of this rank if the store cannot be reached."""
        return RanksFailed(
            f"rank {self.ranks[self.rank]} cannot reach the store of torch.distributed: {first_line(error)}",
            expected="the process that hosts it, rank 0 of the job, to be alive",
            hint="Look for the first rank that died and restart the job",
        )

    def connect(
        self,
        link: str,
        device: Any,
        limit: timedelta,
        *,
        wait: Callable[[list[str]], None] | None = None,
        high_priority: bool = False,
    ) -> Any:
        """Connections between all ranks, each of which calls this, beside those of torch.distributed: a process group
        of NCCL for a GPU, else of gloo, for point-to-point traffic and exchanges.

        Args:
            link: names them; used once in the group.
            device: of the tensors that travel.
            limit: for the connection, and for each wait of gloo's.
            wait: returns when these keys are set, or raises. None: the backend waits for all ranks, which ends for no
                failure.
            high_priority: see `nccl.connect`.

        Raises:
            RuntimeError: they did not connect.
        """
        import torch.distributed as dist

        from . import nccl

        if wait is not None:
            keys = [f"{link}/connecting/{rank}" for rank in range(self.size)]
            self.store.set(keys[self.rank], "1")
            wait(keys)
        store = dist.PrefixStore(link, self.store.store if self.is_local else self.store)
        if device.type == "cuda":
            ranks, local = (self.rank, self.size), self.is_local
            return nccl.connect(store, *ranks, device, limit, high_priority=high_priority, local=local)
        if not self.is_local:
            return dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        backend: Any = dist.ProcessGroupGloo
        options = backend._Options()
        options._timeout, options._devices = min(limit, _LOCAL_LIMIT), [backend.create_device(hostname=_LOOPBACK)]
        return backend(store, self.rank, self.size, options)
