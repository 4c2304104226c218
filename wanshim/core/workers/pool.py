"""The side of the process that starts workers, keeps their copies up to date and calls them.

A worker is a new Python process, never a fork, so it is safe in a process that uses CUDA; and it does not run the
user's program again, so a script without a `__main__` guard and a notebook have workers too.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from wanshim.core.shared.digest import digest_weights
from wanshim.core.shared.forks import Owner
from wanshim.core.streaming import HostCopy, bytes_when_streamed
from wanshim.errors import WorkersFailed, WorkersInvalid
from wanshim.values import checked_seconds

from . import numerics
from .ahead import AHEAD
from .copies import Copies, Update
from .link import Link, LinkLost
from .mover import Mover, file_of_a_store
from .packing import Packed, Placed, elements, pack, unpack
from .process import Worker, occupy_standard_descriptors

DEADLINE_SECONDS = 300.0
_SILENCE_SECONDS = 30.0  # a worker beats twice a second while it works, once it has started


class Workers:
    """Processes that hold copies of modules of this one, and take calls. They start with `begin` or the first `hold`.

    A copy belongs to its module: it goes when that is freed here, and the processes stay. After an error they are gone,
    and the next `hold` starts new ones. A process that is forked from this one cannot use them. They end when this
    process ends, whatever ends it.

    Args:
        device: of this process's modules.
        devices: one for each worker. Where all are GPUs, and no two the same, tensors travel over NCCL.
        deadline: seconds in which a worker must start, and reply to a call.
        prepare: `module:function` that a worker calls first.

    Raises:
        SettingInvalid: `deadline` cannot be waited.
    """

    def __init__(
        self,
        device: torch.device,
        devices: Sequence[torch.device],
        *,
        deadline: float = DEADLINE_SECONDS,
        prepare: str = "",
    ) -> None:
        self.device, self.devices = device, tuple(devices)
        self.deadline = checked_seconds(deadline, "deadline")
        self._prepare = prepare
        self._owner = Owner("the workers")
        self._running = _Running(device)
        self._modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # a program may free its models
        self._keys = itertools.count()
        # The sizes at which copies were compared with their modules, by key; none of new and of changed copies.
        self.proven: defaultdict[int, set[tuple[Any, ...]]] = defaultdict(set)
        self._streamed: dict[int, int] = {}  # by key, bytes on a device of copies that stream; 0: they do not
        self._freed: deque[int] = deque()  # keys of modules that are gone, of which workers have copies
        self._exchanging = threading.Lock()  # messages and the tensors behind them are one
        weakref.finalize(self, _end, self._owner, self._running)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, in the order of `devices`; empty where none run."""
        return tuple(worker.process.pid for worker in self._running.workers)

    @property
    def file(self) -> int:
        """Descriptor, in this process and in every worker, of a file for a store of these processes alone."""
        assert self._running.file is not None, "the workers run"
        return self._running.file

    @property
    def over_nccl(self) -> bool:
        """Whether each process has a GPU of its own."""
        return self.device.type == "cuda" and len({self.device, *self.devices}) == 1 + len(self.devices)

    @property
    def have_started(self) -> bool:
        """Whether each has its device, and they are connected."""
        return self._running.are_ready

    @property
    def hold_nothing(self) -> bool:
        return not any(copies.keys for copies in self._running.copies)

    def holds(self, place: int, modules: Iterable[nn.Module]) -> bool:
        """Whether worker number `place` holds copies of all these modules, as they are or as they were."""
        copies = self._running.copies
        return place < len(copies) and all(self.key(module) in copies[place].keys for module in modules)

    def num_bytes(self, place: int, modules: Iterable[nn.Module] | None = None) -> int:
        """Bytes that worker number `place` holds on its device: of these modules, or of all."""
        if place >= len(self._running.copies):
            return 0
        copies = self._running.copies[place]
        keys = copies.keys if modules is None else {self.key(module) for module in modules}
        streamed = {key for key in keys & copies.keys if self._streamed.get(key)}
        whole = copies.num_bytes(keys - streamed, on_host=self.device.type == "cpu")
        return whole + sum(self._streamed[key] for key in streamed)

    def key(self, module: nn.Module) -> int:
        """The number of a module, the same for as long as it lives."""
        for key, known in list(self._modules.items()):
            if known is module:
                return key
        key = next(self._keys)
        self._modules[key] = module
        weakref.finalize(module, _free, weakref.ref(self), key).atexit = False
        return key

    def begin(self, imports: Iterable[str] = ()) -> None:
        """Start the workers, which then load torch and import, while this process does something else. Those that
        were started ahead are taken.

        Args:
            imports: modules that what they will hold is made of.

        Raises:
            WorkersFailed: a process cannot be started, or is gone already.
            WanshimError: the workers are those of the process from which this one was forked.
        """
        self._owner.check()
        if self._running.workers:
            return
        with self._or_end():
            occupy_standard_descriptors()
            waiting = AHEAD.take(len(self.devices))
            self._running.file = waiting[0].file if waiting else file_of_a_store()
            for device in self.devices:
                worker = waiting.pop(0) if waiting else self._new(device)
                self._running.workers.append(worker)
                self._running.copies.append(Copies())
                worker.assign(device, self.deadline)
            for worker in self._running.workers:
                worker.load(self._prepare, tuple(imports))

    def _new(self, device: torch.device) -> Worker:
        assert self._running.file is not None, "the workers run"
        try:
            return Worker(self._running.file, self.device.index or 0, device.index or 0)
        except (OSError, RuntimeError) as error:  # a limit on processes, or on the threads that wait for them
            raise WorkersFailed(f"no process can be started for {device}: {error}") from error

    def start(self) -> None:
        """Start the workers, and wait until each has its device and they are connected.

        Raises:
            WorkersFailed: one of them is gone or gives no sign of life.
            WanshimError: as `begin`.
        """
        self.begin()
        with self._or_end():
            if not self._running.are_ready:
                self._wait_for_start()

    def use(self, devices: Sequence[torch.device]) -> None:
        """Run on these devices instead, which are no more. Workers that have begun, and not started, have used none."""
        assert not self.have_started
        assert len(devices) <= len(self.devices)
        self.devices = tuple(devices)
        while len(self._running.workers) > len(devices):
            self._running.workers.pop().end()
            self._running.copies.pop()
        for worker, device in zip(self._running.workers, devices, strict=False):
            worker.device = device

    def hold(
        self,
        module: nn.Module,
        *,
        count: int | None = None,
        renew: bool = False,
        set_up: Callable[[nn.Module], None] | None = None,
        moved: bool = False,
        host: HostCopy | None = None,
    ) -> int:
        """Have workers hold a copy of `module` as it is now; start the workers if they do not run.

        A tensor whose elements a worker has, of this module or of another, is not sent again. What changed is found by
        the tensors' digests: an assignment to `.data`, as adapters are merged, changes neither a tensor's identity nor
        its version.

        Args:
            count: how many workers, the first ones; None: all.
            renew: make a copy anew that has all of it, too: its calls may have set attributes, as a LoRA's scale for
                one forward is. Its tensors stay. What a worker has made for the copy is lost.
            set_up: a function of a module file that each worker calls with a new copy.
            moved: the program keeps weights on the host, and moves them to its device as they are needed: a worker has
                them on its device. Of a large one, a part is read to see whether it has changed.
            host: where weights of its blocks lie, for the workers too, which stream them from there.

        Returns:
            The bytes sent to each worker.

        Raises:
            WorkersInvalid: the module cannot be copied, or a worker could not set its copy up.
            WorkersFailed: a worker failed, is gone or gives no sign of life.
            WanshimError: the workers are those of the process from which this one was forked.
        """
        self._owner.check()
        try:
            packed, tensors = pack(module, self.device, moved=moved)
        except WorkersInvalid:
            if host is not None:
                self.close()  # they may have mapped it, of which nothing will be held
            raise
        from wanshim.core.shared.digest_kernel import digests_by_kernel  # and Triton, which no worker needs for it

        digest = digest_weights if moved else digests_by_kernel
        found = digest([elements(t) for t in tensors])
        offsets: dict[int, int] = {}
        if host is not None:
            offsets = host.offsets(tensors)
            for at, offset in offsets.items():  # equal to no tensor but the one there
                found[at] = hash((found[at], offset, host.number))
        addresses = list(zip(found, packed.specs, strict=True))
        self.start()
        key, streamed = self.key(module), (bytes_when_streamed(module) or 0) if host is not None else 0
        if self._streamed.get(key, 0) != streamed:
            self.drop([module])
            self._streamed[key] = streamed
        places = range(len(self.devices) if count is None else count)
        old = [place for place in places if not self._running.copies[place].has(key, packed, addresses)]
        with self._or_end():
            for place in places if renew else ():
                if place not in old:
                    self._running.workers[place].link.send(("renew", key, set_up))
            if not old:
                return 0
            updates = {place: self._running.copies[place].put(key, packed, addresses) for place in old}
            if host is not None:
                for at in offsets:
                    host.write(tensors[at])
            self._send_updates(key, packed, updates, tensors, set_up, host, offsets)
            replies = [self._running.workers[place].link.receive(self.deadline) for place in old]
        for place, reply in zip(old, replies, strict=True):
            if reply[0] == "failed":  # what the framework's own code says, in a worker that lives
                self.drop([module])
                raise WorkersInvalid(f"{self._running.workers[place]} cannot prepare its copy: {reply[1]}")
        self.proven[key].clear()
        return max(sum(tensors[at].nbytes for at in update.new if at not in offsets) for update in updates.values())

    def share(self, host: HostCopy, count: int) -> None:
        """Have the first `count` workers map a copy that weights are on their way to, and lock its pages meanwhile.

        Raises:
            WorkersFailed, WanshimError: as `hold`.
        """
        self._owner.check()
        self.start()
        with self._or_end():
            self._share(host, range(count))

    def _share(self, host: HostCopy, places: Iterable[int]) -> None:
        for place in places:
            link = self._running.workers[place].link
            link.send(("share", host.number, host.bounds))
            for descriptor in host.descriptors:
                link.send_descriptor(descriptor)

    def _send_updates(
        self,
        key: int,
        packed: Packed,
        updates: dict[int, Update],
        tensors: Sequence[torch.Tensor],
        set_up: Callable[[nn.Module], None] | None,
        host: HostCopy | None,
        offsets: Mapping[int, int],
    ) -> None:
        workers = self._running.workers
        placed = None if host is None else Placed(host.number, offsets)
        if host is not None:
            self._share(host, updates)
        alike: dict[tuple[int, ...], dict[int, Link]] = defaultdict(dict)
        for place, update in updates.items():
            new = tuple(sorted(update.new, key=lambda at: not packed.specs[at].on_host))  # no GPU waits for the link
            workers[place].link.send(("hold", key, packed, update.numbers, new, update.dropped, set_up, placed))
            alike[tuple(at for at in new if at not in offsets)][place + 1] = workers[place].link
        for place in updates:
            reply = workers[place].link.receive(self.deadline)
            if reply[0] == "failed":  # before anything was sent, as without the memory for it
                raise WorkersInvalid(f"{workers[place]} cannot take its copy: {reply[1]}")
        for new, links in alike.items():
            moved = (tensors[at].cpu() if packed.specs[at].on_host else tensors[at].to(self.device) for at in new)
            self._running.mover.send(moved, links)

    def drop(self, modules: Iterable[nn.Module]) -> None:
        """Have the workers free their copies of these modules."""
        self._freed.extend(self.key(module) for module in modules)
        self._drop_freed()

    def keep_only(self, modules: Collection[nn.Module]) -> None:
        """Have the workers free their copies of all other modules."""
        self.drop([each for each in list(self._modules.values()) if all(each is not kept for kept in modules)])

    def _drop_freed(self) -> None:
        """Tell the workers which copies to free; where an exchange is under way, it does so at its end."""
        while self._freed and self._exchanging.acquire(blocking=False):
            try:
                keys = {self._freed.popleft() for _ in range(len(self._freed))}
                for worker, copies in list(zip(self._running.workers, self._running.copies, strict=False)):
                    if keys & copies.keys:
                        with contextlib.suppress(LinkLost):  # who needs the worker next is told why
                            worker.link.send(("drop", tuple(keys & copies.keys), copies.drop(keys)))
            finally:
                self._exchanging.release()

    def call(self, place: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> RemoteCall:
        """Have worker number `place` compute `function(*args, **kwargs)`, and return at once.

        Args:
            function: a module that is held, or a function of a module file. Modules among the arguments are those held.

        Raises:
            WorkersInvalid: an argument cannot be copied.
            WorkersFailed: the worker is gone or gives no sign of life.
            WanshimError: the workers are those of the process from which this one was forked.
        """
        self._owner.check()
        packed, tensors = pack((function, args, kwargs), self.device, self._modules)
        with self._or_end():
            if place >= len(self._running.workers):
                raise WorkersFailed("the workers were ended before a call", hint="The next call starts new workers")
            worker = self._running.workers[place]
            worker.link.send(("call", numerics.read(self.device), packed))
            self._running.mover.send(tensors, {place + 1: worker.link})
        return RemoteCall(self, place)

    def close(self) -> None:
        """End the workers. Safe to call twice; `hold` starts new ones."""
        _end(self._owner, self._running)

    def _result(self, place: int, spare: bool) -> Any:
        with self._or_end(spare):
            _, packed = self._reply(self._running.workers[place])
        return self._received(place, packed)

    def _received(self, place: int, packed: Packed) -> Any:
        tensors = [spec.empty(self.device) for spec in packed.specs]
        with self._or_end():
            self._running.mover.receive(tensors, self._running.workers[place].link, place + 1)
        return unpack(packed, tensors)

    def _wait_for_start(self) -> None:
        for worker in self._running.workers:
            worker.link.send(("start", worker.device_there))
        for worker in self._running.workers:
            self._reply(worker)
            worker.link.limit_silence(_SILENCE_SECONDS)
        if self.over_nccl:
            file, size = self.file, 1 + len(self.devices)
            for rank, worker in enumerate(self._running.workers, 1):
                worker.link.send(("connect", file, rank, size, self.deadline))
            self._running.connect(file, size, self.deadline)
            for worker in self._running.workers:
                self._reply(worker)
        self._running.are_ready = True

    def _reply(self, worker: Worker) -> Any:
        reply = worker.link.receive(self.deadline)
        if reply[0] == "failed":
            raise _failed(worker, reply)
        return reply

    @contextlib.contextmanager
    def _or_end(self, spare: bool = False) -> Iterator[None]:
        """After any error, an interrupt too, nobody knows how far an exchange came: the workers end.

        Args:
            spare: unless a worker has replied that a call raised there, and nothing else was under way.
        """
        with self._exchanging:
            try:
                yield
            except LinkLost as lost:
                cause = self._cause(lost)
                self.close()
                raise cause from lost
            except BaseException as error:
                if not (spare and isinstance(error, WorkersFailed)):
                    self.close()
                raise
        self._drop_freed()

    def _cause(self, lost: LinkLost) -> WorkersFailed:
        """Why a link failed: an error that the worker reported before, or how it ended, or that it is silent."""
        worker = next((worker for worker in self._running.workers if worker.link is lost.link), None)
        if worker is None:
            return WorkersFailed("the workers were ended within a call", hint="The next call starts new workers")
        with contextlib.suppress(LinkLost):
            reply = worker.link.receive(0.0)
            if reply[0] == "failed":
                return _failed(worker, reply)
        return WorkersFailed(
            f"{worker} {worker.how_it_ended() or lost}",
            expected="a worker that lives and replies within the deadline",
            hint="The next call starts new workers",
        )


class RemoteCall:
    """A call that a worker computes."""

    def __init__(self, workers: Workers, place: int) -> None:
        self._workers, self._place = workers, place

    def result(self, *, spare: bool = False) -> Any:
        """Wait for it; once.

        Args:
            spare: keep the workers if it raised in one of them. By default they end.

        Raises:
            WorkersFailed: it raised in the worker, or the worker is gone or did not reply within the deadline.
        """
        return self._workers._result(self._place, spare)


class Replies:
    """The replies to calls that workers compute together with this process, which may wait for them meanwhile.

    A thread waits for each. The first failure of a worker ends all of them, so that nobody waits for it.

    Args:
        calls: of one `Workers`.
        failed: called, in a thread, when a worker has failed and all are gone.
    """

    def __init__(self, calls: Sequence[RemoteCall], failed: Callable[[], None]) -> None:
        self._workers, self._calls, self._failed = calls[0]._workers, calls, failed
        self._first = threading.Lock()
        self._cause: WorkersFailed | None = None
        self._packed: dict[int, Packed] = {}
        workers = self._workers._running.workers
        self._threads = [
            threading.Thread(target=self._wait, args=(p, workers[p]), name="wanshim-replies", daemon=True)
            for p in (call._place for call in calls)
        ]
        for thread in self._threads:
            thread.start()

    def results(self) -> list[Any]:
        """Wait for all; once.

        Raises:
            WorkersFailed: a worker raised, is gone or did not reply within the deadline.
        """
        self.raise_failure()
        return [self._workers._received(call._place, self._packed[call._place]) for call in self._calls]

    def raise_failure(self) -> None:
        """Wait until each worker has replied or one has failed.

        Raises:
            WorkersFailed: as `results`.
        """
        for thread in self._threads:
            thread.join()
        if self._cause is not None:
            raise self._cause

    def _wait(self, place: int, worker: Worker) -> None:
        try:
            self._packed[place] = self._workers._reply(worker)[1]
        except (LinkLost, WorkersFailed) as error:
            with self._first:
                if worker in self._workers._running.workers:  # else they are given up already
                    self._cause = error if isinstance(error, WorkersFailed) else self._workers._cause(error)
                    self._workers.close()
                    self._failed()


class _Running:
    """The processes, and what they share with this one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.workers: list[Worker] = []
        self.copies: list[Copies] = []  # of each
        self.are_ready = False
        self.file: int | None = None
        self.mover = Mover(device)
        self.ending = threading.RLock()  # a worker's failure and an interrupt may end them at once

    def connect(self, file: int, size: int, patience: float) -> None:
        try:
            self.mover = Mover.over_nccl(self._device, file, 0, size, patience)
        except RuntimeError as error:
            raise WorkersFailed(f"NCCL does not connect {self._device} with its workers: {error}") from error


def _end(owner: Owner, running: _Running) -> None:
    if not owner.is_here:
        return
    with running.ending:
        with contextlib.suppress(Exception):  # whatever state it is in, it is being given up
            running.mover.close()
        running.mover = Mover(running._device)
        running.are_ready = False
        running.copies.clear()
        while running.workers:
            running.workers.pop().end()


def _free(workers: weakref.ref[Workers], key: int) -> None:
    """Called when a module is gone, in whatever thread and line that happens."""
    here = workers()
    if here is not None and here._owner.is_here:
        here._freed.append(key)
        here._drop_freed()


def _failed(worker: Worker, reply: Sequence[str]) -> WorkersFailed:
    _, text, trace = reply
    return WorkersFailed(f"{worker} failed: {text}", hint=f"The next call starts new workers. Its traceback:\n{trace}")
