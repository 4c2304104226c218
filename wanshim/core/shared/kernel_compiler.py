"""Triton's kernels compiled beside the program, in threads that end with it.

Triton compiles a kernel at its first launch, a third of a second each, and keeps it on disk. What a call launches is
known from a dry run (`kernel_launch.py`) before it computes; it is the framework's until its kernels are compiled.
Those that an earlier process has compiled, as a note in Triton's cache says, need only be loaded.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition, Event, Lock, Thread, current_thread
from time import perf_counter
from typing import Any

import torch

from wanshim.core.shared.fallback import cause_of
from wanshim.core.shared.kernel_launch import Launch
from wanshim.core.shared.optional_triton import triton

logger = logging.getLogger("wanshim.kernels")

_LOADING = 10.0  # seconds that a call waits for kernels that are on disk
_LAST = 10.0  # seconds that the end of the process waits for the kernels under way
_THREADS = 4
_NOTE = "compiled"


@dataclass(eq=False)
class Kernel:
    """A launch to compile for one device, and whether that is done."""

    launch: Launch
    device: torch.device
    done: Event = field(default_factory=Event)
    _begun: Lock = field(default_factory=Lock)

    def compile(self) -> None:
        """Once. Whatever goes wrong is left to the call that launches it."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            with torch.cuda.device(self.device):
                self.launch.compile()
            self._entry().put("", _NOTE, binary=False)
        finally:
            self.done.set()

    @property
    def on_disk(self) -> bool:
        """Has a process compiled it?"""
        with suppress(Exception):
            return bool(self._entry().has_file(_NOTE))
        return False

    def _entry(self) -> Any:
        """The entry of Triton's cache that has the note: both go when the cache goes."""
        launch, gpu = self.launch, torch.cuda.get_device_capability(self.device)
        facts = launch.kernel.cache_key, launch.arguments, launch.options, gpu, triton.__version__
        return triton.runtime.cache.get_cache_manager(hashlib.sha256(repr(facts).encode()).hexdigest())


class KernelCompiler:
    """Compiles in threads that end with the process."""

    def __init__(self) -> None:
        self.started = False  # anything was asked for
        self._kernels: dict[tuple[Launch, torch.device], Kernel] = {}
        self._waiting: deque[Callable[[], object]] = deque()
        self._threads: list[Thread] = []
        self._calls = 0
        self._ends = False
        self._changed = Condition()
        self._loading = Lock()

    def start(self, launches: Iterable[Launch], device: torch.device, *, awaited: bool) -> list[Kernel]:
        """Have these compiled, behind what was asked for until now, or before it where a call awaits them."""
        with self._changed:
            kernels = [self._kernels.setdefault((each, device), Kernel(each, device)) for each in launches]
        # One that waits already comes twice, and the second time there is nothing to do.
        self.do(*(each.compile for each in kernels if not each.done.is_set()), first=awaited)
        return kernels

    def do(self, *work: Callable[[], object], first: bool = False) -> None:
        """Have this done behind what was asked for until now, or before it."""
        self.started = True
        with self._changed:
            self._waiting = deque([*work, *self._waiting] if first else [*self._waiting, *work])
            for _ in range(min(_threads(), len(self._waiting)) - len(self._threads)):
                self._threads.append(Thread(target=self._work, name="wanshim kernels", daemon=True))
                self._threads[-1].start()

    def _work(self) -> None:
        with self._loading, suppress(Exception):  # Triton itself, which takes half a second
            triton.runtime.driver.active.get_current_target()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._calls or not self._waiting or self._ends)
                if not self._waiting or self._ends:
                    self._threads.remove(current_thread())
                    self._changed.notify_all()
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception as error:
                logger.debug("not compiled ahead: %s", cause_of(error))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a call computes, nothing is begun: Triton holds the interpreter."""
        with self._changed:
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all that was asked for is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._threads)

    def stop(self) -> None:
        """Begin no more: a process must not end within a compiler."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            threads = list(self._threads)
        last = perf_counter() + _LAST
        for thread in threads:
            thread.join(max(0.0, last - perf_counter()))


COMPILER = KernelCompiler()
atexit.register(COMPILER.stop)


def missing(kernels: Sequence[Kernel], at_most: float) -> bool:
    """Are some of what a call launches not there yet? Waits for those that have only to be loaded.

    Args:
        at_most: seconds to wait: other ranks wait for this one meanwhile.
    """
    left = [kernel for kernel in kernels if not kernel.done.is_set()]
    if not all(kernel.on_disk for kernel in left):
        return True
    last = perf_counter() + min(at_most, _LOADING)
    return not all(kernel.done.wait(max(0.0, last - perf_counter())) for kernel in left)


def _threads() -> int:
    """One where Triton's release does not say that it compiles in several."""
    return max(1, min(_THREADS, (os.cpu_count() or 1) // 4)) if hasattr(triton, "AsyncCompileMode") else 1
