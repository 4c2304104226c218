"""Triton's kernels compiled ahead of time, beside the program.

Triton compiles a kernel at its first launch, a third of a second each, and keeps it on disk. What the Wan VAEs launch
is known before: the package brings the signatures (`kernels.json`, written by benchmarks/kernel_table.py), and threads
compile them from when a VAE on a GPU is parallelized. A call that comes before they are done is the framework's. Once
all that a call launches is on disk, Triton's cache says so, and calls of later processes wait for it to be loaded.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import math
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Condition, Event, Lock, Thread, current_thread
from time import perf_counter
from typing import Any

import torch

from wanshim.core.decoding.model.encoder_graph import EncoderGraph, Graph
from wanshim.core.shared.optional_triton import triton

logger = logging.getLogger("wanshim.decoding")

TABLE = Path(__file__).with_name("kernels.json")
ACTIVATIONS = "activations"  # the dtype of a pointer argument that is the call's
UNALIGNED = ", unaligned"  # behind the dtype: the pointer is no multiple of 16 bytes
# A value of each kind of number that Triton tells apart: its width, equal to 1, divisible by 16.
NUMBERS = {"1": 1, "i32": 3, "i32/16": 16, "i64": 2**32 + 3, "i64/16": 2**32, "fp32": 0.5}
_LOADED = 0.3  # seconds: a kernel that takes longer is compiled, and not loaded from disk
_PATIENCE = 5e-9  # seconds for each pixel; on an H100 diffusers takes 2e-8 (encode, 2.2) to 6e-8 (decode, 2.1)
_MOST = 1.0  # seconds that a call waits while no kernel is known to be compiled
_LOADING = 10.0  # seconds that a call waits for kernels that are on disk
_LAST = 10.0  # seconds that the end of the process waits for the kernels under way
_THREADS = 4
_NOTE = "all_of_a_call"
Call = tuple[str, tuple[str, ...]]  # its name, and what its convolutions run by
# Without cuDNN's engines, and with them.
BY_TORCH, BY_ANY = ("torch",), ("engines", "both", "torch")
_USUAL = 3, 384 * 640  # latent frames and pixels of the smallest calls of which the table says what was seen
_VIDEOS = ("one video", "several videos")
_MULTIPLES = ((16, 16), (8, 16), (4, 16), (4, 4), (2, 16), (2, 4))  # of latents of even height and width


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch for which Triton compiles one kernel.

    Args:
        of: the calls that launch it, as `kernel_sets` names them. The keys say what their convolutions run by:
            "engines" of cuDNN, "torch", or "both". Other keys are kinds of GPU, such as "sm90", for calls of usual
            sizes that launched it there.
        kernel: module and name.
        arguments: in order: the dtype of a pointer, one of NUMBERS, or a constant's value.
        options: of the launch, such as `num_warps`.
        sizes: of a norm: the name of one of `strict_checks.Sizes`, for frameworks that compute lengths so.
    """

    of: Mapping[str, tuple[str, ...]]
    kernel: str
    arguments: Mapping[str, str | int]
    options: Mapping[str, int]
    sizes: str = ""

    def is_of(self, name: str, by: Sequence[str]) -> bool:
        """Does a call of this name launch it, whose convolutions run `by`, or as they do on a kind of GPU?"""
        return any(name in self.of.get(each, ()) for each in by)

    @property
    def function(self) -> Any:
        """Triton's."""
        module, name = self.kernel.split(".")
        return getattr(import_module(f".{module}", __package__), name)

    def compile(self, dtype: torch.dtype) -> None:
        """Compile it for the current device, or load what Triton has on disk. The device itself is not touched: what
        another thread captures in a graph of CUDA would end.

        Args:
            dtype: of the activations.
        """
        values = [_value(each, dtype) for each in self.arguments.values()]
        compiled = self.function.warmup(*values, grid=(1,), **self.options)
        with suppress(AttributeError, TypeError):  # releases before 3.7 compile what launches it, too
            triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


def _value(argument: str | int, dtype: torch.dtype) -> object:
    if not isinstance(argument, str):
        return argument
    if argument in NUMBERS:
        return NUMBERS[argument]
    name = argument.removesuffix(UNALIGNED)
    pointer = triton.runtime.jit.MockTensor(dtype if name == ACTIVATIONS else getattr(torch, name))
    if name != argument:
        pointer.data_ptr = lambda: 8
    return pointer


def kernel_sets(graph: Graph, *, strict: bool) -> tuple[str, ...]:
    """Names of the calls that launch the same kernels. Strict ones read rows in place: Triton tells apart whether the
    length of a row, and of a picture, is a multiple of 16, and both grow with each stage of a VAE. So a set is
    named after the largest power of two, up to 16, that divides a latent's row, and one that divides its picture; and
    several videos are further apart than a picture is long."""
    kind = f"{graph.verb}, {graph.conv_in.in_channels} to {graph.conv_in.out_channels} channels"
    if not strict:
        return (f"{kind}, fast",)
    return tuple(
        f"{kind}, strict, rows of {rows}, pictures of {pictures}, {videos}"
        for videos in _VIDEOS
        for rows, pictures in _MULTIPLES
    )


def kernel_set(graph: Graph, shape: Sequence[int], *, strict: bool) -> str:
    """The set of kernels of a call with an input of this shape. Latents of odd height or width, which no model makes,
    launch others besides those of the set."""
    sets = kernel_sets(graph, strict=strict)
    if not strict:
        return sets[0]
    height, width = shape[-2:]
    if isinstance(graph, EncoderGraph):
        height, width = (size // (graph.scale_s * graph.patch_size) for size in (height, width))
    rows = max(2, math.gcd(width, 16))
    pictures = 16 if rows > 4 or height * width % 16 == 0 else 4
    return sets[_MULTIPLES.index((rows, pictures)) + (len(_MULTIPLES) if shape[0] > 1 else 0)]


def is_usual(graph: Graph, shape: Sequence[int]) -> bool:
    """Is a call with an input of this shape one of which is known, on the GPUs of the table, what it launches?"""
    frames, area = _USUAL
    return graph.extent(shape)[2] >= frames and math.prod(_video(graph, shape)[-2:]) >= area


def patience(graph: Graph, shape: Sequence[int]) -> float:
    """Seconds that a call may wait for kernels under compilation, in place of being left to the framework."""
    batch, _, *sizes = _video(graph, shape)
    return _PATIENCE * batch * math.prod(sizes)


def _video(graph: Graph, shape: Sequence[int]) -> Sequence[int]:
    """The shape of the video of an input of this shape."""
    return shape if isinstance(graph, EncoderGraph) else graph.output_shape(graph.extent(shape))


@cache
def kernel_table() -> tuple[Launch, ...]:
    """The launches that the package knows, in the order of use."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))

    def calls(numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(table["calls"][at] for at in numbers)

    return tuple(
        Launch(**row | {"of": {by: calls(numbers) for by, numbers in row["of"].items()}}) for row in table["launches"]
    )


@cache
def calls_seen(gpu: str) -> frozenset[str]:
    """The calls of usual sizes of which the table says what they launch on this kind of GPU."""
    return frozenset(name for launch in kernel_table() for name in launch.of.get(gpu, ()))


@dataclass(eq=False)
class Kernel:
    """A launch to compile for one device, and what became of it."""

    launch: Launch
    device: torch.device
    dtype: torch.dtype
    done: Event = field(default_factory=Event)
    began: float = 0.0
    took: float = 0.0
    on_disk: bool = False
    awaited: bool = False  # by a call

    def compile(self) -> None:
        """Whatever goes wrong is left to the call that launches it."""
        self.began = perf_counter()
        try:
            with torch.cuda.device(self.device):
                self.launch.compile(self.dtype)
            self.on_disk = True
        except Exception as error:
            logger.debug("%s is not compiled ahead: %s: %s", self.launch.kernel, type(error).__name__, error)
        self.took = perf_counter() - self.began
        self.done.set()

    @property
    def slow(self) -> bool:
        """Is it compiled, and not loaded?"""
        return self.began > 0 and (self.took or perf_counter() - self.began) > _LOADED


class KernelCompiler:
    """Compiles in threads that end with the process."""

    def __init__(self) -> None:
        self.started = False  # any kernel was asked for
        self._kernels: dict[tuple[int, torch.device, torch.dtype], Kernel] = {}
        self._of_calls: dict[tuple[int, ...], list[Kernel]] = {}
        self._waiting: deque[Kernel] = deque()
        self._threads: list[Thread] = []
        self._lock, self._loading = Lock(), Lock()
        self._calls = 0
        self._changed = Condition(self._lock)
        self._on_disk_at_start: bool | None = None

    def start(
        self, calls: Mapping[Call, Sequence[Launch]], device: torch.device, dtype: torch.dtype
    ) -> dict[Call, list[Kernel]]:
        """Have what these calls launch compiled; what was asked for before is not compiled again. Once all kernels of
        a call are on disk, that is noted there."""
        self.started = True
        with self._lock:
            if self._on_disk_at_start is None:
                self._on_disk_at_start = _any_on_disk()
            found = {call: [self._asked(each, device, dtype) for each in launches] for call, launches in calls.items()}
            of_calls = {tuple(map(id, kernels)): kernels for kernels in found.values()}
            new = {key: kernels for key, kernels in of_calls.items() if key not in self._of_calls}
            self._of_calls |= new
            for _ in range(min(_threads(), len(self._waiting)) - len(self._threads)):
                thread = Thread(target=self._work, name="wanshim kernels", daemon=True)
                thread.start()
                self._threads.append(thread)
        _note_those_on_disk(new.values())
        return found

    def _asked(self, launch: Launch, device: torch.device, dtype: torch.dtype) -> Kernel:
        key = (id(launch), device, dtype)
        if key not in self._kernels:
            self._kernels[key] = Kernel(launch, device, dtype)
            self._waiting.append(self._kernels[key])
        return self._kernels[key]

    @property
    def loads(self) -> bool:
        """Can any kernel be there already? Otherwise each has to be compiled, and a call need not wait to see it."""
        return self._on_disk_at_start is not False

    def soon(self, kernels: Sequence[Kernel], seconds: float) -> bool:
        """Will these, which come next, be there within so many seconds, at the pace of those compiled so far?"""
        asked = set(map(id, kernels))
        with self._lock:
            known = list(self._kernels.values())
        done = [each for each in known if each.done.is_set()]
        took = [each.took for each in done if each.slow] or [each.took for each in done]
        others = sum(each.began > 0 and not each.done.is_set() and id(each) not in asked for each in known)
        each = sum(took) / len(took) if took else math.inf
        return each * math.ceil((len(kernels) + others) / _threads()) <= seconds

    def _work(self) -> None:
        with self._loading, suppress(Exception):  # Triton itself, which takes half a second
            triton.runtime.driver.active.get_current_target()
        while True:
            with self._lock:
                self._changed.wait_for(lambda: not self._calls or not self._waiting or self._waiting[0].awaited)
                if not self._waiting:
                    self._threads.remove(current_thread())
                    return
                kernel = self._waiting.popleft()
            kernel.compile()
            self._note(kernel)

    def _note(self, kernel: Kernel) -> None:
        """Say on disk which calls find all of their kernels there, if this was the last one."""
        with self._lock:  # `start` may add others meanwhile
            of_calls = list(self._of_calls.values())
        _note_those_on_disk(kernels for kernels in of_calls if kernel in kernels)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a call computes, only kernels that another one awaits are begun: Triton holds the interpreter."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                self._changed.notify_all()

    def first(self, kernels: Sequence[Kernel]) -> None:
        """Compile these before the others: a call awaits them. Those that an earlier one awaited come next."""
        asked = set(map(id, kernels))
        with self._lock:
            for kernel in kernels:
                kernel.awaited = True
            self._waiting = deque(sorted(self._waiting, key=lambda each: (id(each) not in asked, not each.awaited)))
            self._changed.notify_all()

    def stop(self) -> None:
        """Begin no more: a process must not end within a compiler."""
        with self._lock:
            self._waiting.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        last = perf_counter() + _LAST
        for thread in threads:
            thread.join(max(0.0, last - perf_counter()))


def by_engines(gpu: str) -> tuple[str, ...]:
    """The ways by which convolutions run on this kind of GPU."""
    return ("engines", gpu)


COMPILER = KernelCompiler()
atexit.register(COMPILER.stop)


def needed(
    graph: Graph, dtype: torch.dtype, *, strict: bool, ways: Iterable[tuple[str, ...]], sizes: Collection[str]
) -> dict[Call, list[Launch]]:
    """Launches of calls of this graph; none where the package does not know.

    Args:
        ways: what their convolutions may run by.
        sizes: of norms, as the framework may have them; see `Launch`.
    """
    if triton is None or dtype not in (torch.bfloat16, torch.float16):
        return {}
    table = [each for each in kernel_table() if each.sizes in ("", *sizes)]
    found: dict[Call, list[Launch]] = {}
    for by in ways:
        names = kernel_sets(graph, strict=strict)
        known = names if by in (BY_TORCH, BY_ANY) else calls_seen(by[-1]).intersection(names)
        found |= {(name, by): [each for each in table if each.is_of(name, by)] for name in names if name in known}
    return {call: launches for call, launches in found.items() if launches}


def missing(kernels: Sequence[Kernel], at_most: float, compiling: float = 0.0) -> bool:
    """Are some of what a call launches not there yet? Waits while what is left may only have to be loaded, or will be
    compiled soon.

    Args:
        at_most: seconds to wait: other ranks wait for this one meanwhile.
        compiling: seconds to wait for a compilation.
    """
    left = [kernel for kernel in kernels if not kernel.done.is_set()]
    if not left:
        return False
    COMPILER.first(left)
    now = perf_counter()
    if COMPILER.soon(left, compiling):
        until = now + min(at_most, compiling)
        if all(kernel.done.wait(max(0.0, until - perf_counter())) for kernel in left):
            return False
    if not COMPILER.loads:
        return True
    loads = _are_on_disk(kernels)
    last = now + min(at_most, _LOADING if loads else _MOST)
    for kernel in left:
        while not kernel.done.wait(0.01):
            if perf_counter() > last or (not loads and any(each.slow for each in kernels)):
                return True
    return False


def _are_on_disk(kernels: Sequence[Kernel]) -> bool:
    with suppress(Exception):
        return bool(_note_of(kernels).has_file(_NOTE))
    return False


def _any_on_disk() -> bool:
    """Has Triton kept any kernel? Where its release does not say which folder it keeps them in, it may have."""
    try:
        return any(Path(triton.knobs.cache.dir).iterdir())
    except FileNotFoundError:
        return False
    except Exception:
        return True


def _note_those_on_disk(of_calls: Iterable[Sequence[Kernel]]) -> None:
    """Say so on disk of each call all of whose kernels are there."""
    for kernels in of_calls:
        if kernels and all(each.on_disk for each in kernels):
            with suppress(Exception):
                _note_of(kernels).put("", _NOTE, binary=False)


def _note_of(kernels: Sequence[Kernel]) -> Any:
    """The entry of Triton's cache that has a note once all of these are in the cache: it goes when they go."""
    rows = sorted(json.dumps([k.launch.kernel, k.launch.arguments, k.launch.options]) for k in kernels)
    sources = sorted({kernel.launch.function.cache_key for kernel in kernels})
    with torch.cuda.device(kernels[0].device):
        target = triton.runtime.driver.active.get_current_target()
    facts = json.dumps([rows, sources, str(kernels[0].dtype), str(target), triton.__version__])
    return triton.runtime.cache.get_cache_manager(hashlib.sha256(facts.encode()).hexdigest())


def _threads() -> int:
    """One where Triton's release does not say that it compiles in several."""
    return max(1, min(_THREADS, (os.cpu_count() or 1) // 4)) if hasattr(triton, "AsyncCompileMode") else 1
