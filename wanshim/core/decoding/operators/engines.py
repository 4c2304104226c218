"""Convolutions by the fastest of cuDNN's engines, which is found on this GPU.

torch takes the engine that cuDNN's heuristics rank first, and for the decoder's largest layers another is twice as fast
(docs/explanation/decode.md). Here all engines of a convolution are timed once, on a few of its frames, and the fastest
is kept on disk under GPU, driver, cuDNN and sizes. In each process its result is compared before it is used: with a
matrix product, or bit by bit with the framework's (`strict_convolutions.py`). Long videos go through an engine a few
frames at a time: some take no tensor of 2^31 values.

With a `Learning`, a size that is not known takes the engine that the layer has at the nearest known size, by this
machine's earlier runs or by the table that the package brings; and where none is known, engines are timed in a share of
the time of each call, and torch's choice computes until all are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import torch

from wanshim.core.shared.files import engine_folder
from wanshim.core.shared.recent import Recent

from . import fused
from .convolution import Convolution, Convolve
from .cudnn_graph import DTYPES, Engine, Frontend, FrontendMissing, Run
from .engine_store import EngineStore, Facts, engine_table
from .learning import Learning, NotYet
from .winograd import GROUP, Buffers, DeferredOutput, Product, groups_at_once, groups_of

logger = logging.getLogger("wanshim.decoding")

_LIMIT = 1.05  # of torch's time: on more frames torch often takes a slower engine, hardly ever a faster one
_CLOSE = 2.0**-7  # of the result's norm: rounding to bf16 alone differs by less than 2^-8
_REPEATS = 4
_GIVE_UP = 1.5  # an engine this many times slower than the best is not timed again
_SIZES = 4096  # of convolutions: a decode has some forty
_RUNS = 1024  # each holds a graph of cuDNN


_Key: TypeAlias = tuple[Any, ...]


class Engines:
    """The engines of one device: searched, kept, checked, and used.

    Args:
        frontend: cuDNN's, on that device.
        store: where the fastest engines are kept.
        learning: spreads it over calls; None: the first call of a size learns all.
    """

    def __init__(self, frontend: Frontend, store: EngineStore, learning: Learning | None = None) -> None:
        # Called before the host waits for the device, to bound that wait.
        self.settle: Callable[[], object] = lambda: None
        self._frontend = frontend
        self._store = store
        self._learning = learning
        self._searches: Recent[_Key, _Search] = Recent(_SIZES)  # not ended yet
        self._waiting: Recent[_Key, None] = Recent(_SIZES)  # what has to be searched for, where learning is spread
        self._ranked: Recent[_Key, tuple[float, list[tuple[float, Engine]]]] = Recent(_SIZES)  # first: torch's time
        self._chosen: Recent[_Key, Engine | None] = Recent(_SIZES)
        self._runs: Recent[_Key, Run | None] = Recent(_RUNS)

    def call(self) -> AbstractContextManager[None]:
        """Surrounds each call of the VAE, of whose time learning has a share."""
        return nullcontext() if self._learning is None else self._learning.call()

    @property
    def learn(self) -> bool:
        """Whether what is not known may be learned now."""
        return self._learning is None or self._learning.is_due

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
    ) -> torch.Tensor:
        """`torch_convolve` but for rounding, by the fastest engine; channels last. Without one, by torch."""
        conv = Convolution(weight, tuple(stride), tuple(padding))
        if not _takes(x):
            return conv.by_torch(x)
        with torch.cuda.device_of(x):
            out = conv.empty(x)
            direct = _direct(conv, x, out, self._close_run)
            if direct is None:
                del out
                return conv.by_torch(x)
            direct()
        return out

    def by_winograd(
        self, x: torch.Tensor, weight: torch.Tensor, split: Callable[[], torch.Tensor], padding: tuple[int, ...]
    ) -> DeferredOutput | None:
        """As `__call__` with a stride of 1, with fewer products (`winograd.py`); None: that is not faster.

        Args:
            split: gives what `winograd.split_weight` makes of `weight`.
        """
        conv = Convolution(weight, (1, 1, 1), tuple(padding))
        shape = torch.Size(conv.output_shape(x))
        batch, given, _, height, width = x.shape
        groups = groups_at_once(shape[2], batch, height, width, (given, len(weight)))
        if not groups or not _takes(x):
            return None
        spans = conv.spans(shape[2], groups, unit=GROUP)
        # Whole groups are judged, and decide for an incomplete one beside them.
        judged = sorted(spans, key=lambda span: (span[1] - span[0]) % GROUP)
        outputs = "whole groups" if (judged[0][1] - judged[0][0]) % GROUP == 0 else shape[2]
        runs = {}
        with torch.cuda.device_of(x):
            for start, stop in judged:
                run = self._winograd_run(conv, split, conv.piece(x, start, stop), outputs)
                if run is None:
                    return None
                runs[start, stop] = run
        return DeferredOutput(x, shape, split(), [(*span, runs[span]) for span in spans])

    def equal(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        same: Callable[[torch.Tensor], bool],
    ) -> Convolve | None:
        """The fastest engine whose result is the `same` as that expected, all channels last; None: there is none.

        Args:
            same: may write into what it is given.

        Raises:
            NotYet: a later call learns whether there is one.
        """
        conv = Convolution(weight, tuple(stride), tuple(padding))
        if not _takes(x):
            return None
        with torch.cuda.device_of(x):
            out = conv.empty(x)

            def is_equal(run: Run) -> bool:
                run(x, weight, out)
                return same(out)

            facts = self._facts(conv, x) | {"equal": "random values", "length": x.shape[conv.dim]}
            self._chosen.pop(tuple(facts.items()), None)  # asked again: torch's flags may have changed
            with self._lesson():
                run = self._chosen_run(conv, x, out, facts, partial(self._fastest, conv, x, _LIMIT), is_equal)
        return None if run is None else partial(_convolve_by, run)

    def _close_run(self, conv: Convolution, x: torch.Tensor, out: torch.Tensor) -> Run | None:
        """The checked engine for a piece; None: torch's own choice."""
        return self._once((tuple(x.shape), x.stride(), *_sizes(conv, x)), lambda: self._checked_run(conv, x, out))

    def _checked_run(self, conv: Convolution, x: torch.Tensor, out: torch.Tensor) -> Run | None:
        search, accept = partial(self._fastest, conv, x, _LIMIT), partial(self._is_close, conv, x, out)
        return self._chosen_run(conv, x, out, self._facts(conv, x), search, accept)

    def _winograd_run(
        self, conv: Convolution, split: Callable[[], torch.Tensor], x: torch.Tensor, outputs: str | int
    ) -> Run | None:
        """The checked engine for the products of a piece; None: the direct convolution is faster."""
        key = ("winograd", groups_of(x.shape[2] - 2), outputs, *_sizes(conv, x))
        return self._once(key, lambda: self._chosen_for_winograd(conv, split(), x, outputs))

    def _once(self, key: _Key, find: Callable[[], Run | None]) -> Run | None:
        """The result of `find`, kept under `key`; None where memory does not suffice to compare, or until it is
        known."""
        if key not in self._runs:
            if key in self._waiting and not self.learn:
                return None
            self.settle()
            try:
                with self._lesson():
                    self._runs[key] = find()
            except NotYet:
                self._waiting[key] = None
                return None
            except torch.OutOfMemoryError:  # to compare takes more than to decode
                logger.info("too little memory to compare an engine of cuDNN: this process does without it")
                self._runs[key] = None
        return self._runs[key]

    def _chosen_for_winograd(
        self, conv: Convolution, weights: torch.Tensor, x: torch.Tensor, outputs: str | int
    ) -> Run | None:
        out = conv.empty(x)
        buffers = Buffers(x, out.shape)
        product = Convolution(weights[0], conv.stride, conv.padding)
        given, result = buffers.parts[0], buffers.products[0]

        def whole(run: Run, x: torch.Tensor, _: torch.Tensor, out: torch.Tensor) -> None:
            fused.sum_into(buffers.multiply(x, weights, run), None, None, out)

        def search() -> list[Engine] | None:
            direct = _direct(conv, x, out, self._checked_run)

            def alone() -> None:  # with the sum that follows, which takes longer over products
                if direct is None:
                    fused.sum_into(conv.by_torch(x), None, None, out)
                else:
                    direct()
                    fused.sum_into(out, None, None, out)

            for engine in self._fastest(product, given, inf)[:1]:  # torch computes no products
                run = self._build(product, given, result, engine)
                if run is not None:
                    took = self._time_often(partial(whole, run, x, conv.weight, out))
                    return None if took == inf else [engine] if took < self._time_often(alone) else []
            return []

        def accept(run: Run) -> bool:
            return self._is_close(conv, x, out, partial(whole, run))

        facts = self._facts(conv, x) | {"by": "Winograd F(4, 3) in time", "outputs": outputs}
        return self._chosen_run(product, given, result, facts, search, accept)

    def _chosen_run(
        self,
        conv: Convolution,
        x: torch.Tensor,
        out: torch.Tensor,
        facts: Facts,
        search: Callable[[], list[Engine] | None],
        accept: Callable[[Run], bool],
    ) -> Run | None:
        """The run of the engine kept for `facts`; else the first of `search` that is accepted, which is then kept.

        Args:
            search: None: nothing was learned, and nothing is kept for another process.

        Raises:
            NotYet: a later call goes on with the search.
        """
        key = tuple(facts.items())
        if key in self._chosen:
            engine = self._chosen[key]
            return None if engine is None else self._build(conv, x, out, engine)
        kept, known = self._store.get(facts)
        if known and kept is not None and self._build(conv, x, out, kept) is None:
            known = False  # kept by a process whose cuDNN had it
        if not known and self._learning is not None and key not in self._waiting:
            for engine in self._store.near(facts):
                run = None if engine is None else self._build(conv, x, out, engine)
                if engine is None or (run is not None and accept(run)):
                    self._chosen[key] = engine
                    return run
            self._waiting[key] = None
        candidates = [kept] if known else search()
        for engine in candidates or ():
            run = None if engine is None else self._build(conv, x, out, engine)
            if run is not None and accept(run):
                break
        else:
            engine = run = None
        self._chosen[key] = engine
        if not known and candidates is not None:
            self._store.put(facts, engine)
        return run

    def _build(self, conv: Convolution, x: torch.Tensor, out: torch.Tensor, engine: Engine) -> Run | None:
        return self._frontend.graph(conv, x, out).build(engine)

    def _is_close(self, conv: Convolution, x: torch.Tensor, out: torch.Tensor, run: Product) -> bool:
        """Is the result of `run` that of a matrix product, but for rounding, all over the first frame and the last?"""
        run(x, conv.weight, out)
        for at in dict.fromkeys((0, out.shape[conv.dim] - 1)):
            found, expected = conv.samples(x, out, at)
            apart, size = (torch.linalg.vector_norm(y) for y in (found - expected, expected))
            if not bool(apart <= _CLOSE * size):
                logger.warning("an engine of cuDNN gives another result than torch; it is not used: %s", conv.text(x))
                return False
        return True

    def _facts(self, conv: Convolution, x: torch.Tensor) -> Facts:
        """The key of an engine: everything but the number of frames."""
        names = ("dtype", "batch", "input", "weight", "stride", "padding")
        return self._frontend.facts() | dict(zip(names, _sizes(conv, x)))

    def _fastest(self, conv: Convolution, x: torch.Tensor, limit: float) -> list[Engine]:
        """The engines that take less than `limit` times torch's time on a few frames, the fastest first."""
        key = _sizes(conv, x)
        if key not in self._ranked:
            self._ranked[key] = self._search(conv, x)
        alone, ranked = self._ranked[key]
        return [engine for took, engine in ranked if took < limit * alone]

    def _search(self, conv: Convolution, x: torch.Tensor) -> tuple[float, list[tuple[float, Engine]]]:
        """Torch's time on a few frames, and the engines by theirs; goes on where an earlier call had to stop."""
        frames = min(conv.length(x), (x.shape[conv.dim] - conv.reach) // conv.step + 1)
        part = conv.piece(x, 0, frames)
        key = (tuple(part.shape), part.stride(), *_sizes(conv, x))  # a graph takes tensors like its own
        if key not in self._searches:
            if not self.learn:
                raise NotYet
            _announce(self._store.folder, at_once=self._learning is None)
            logger.info("timing cuDNN's engines for a convolution of %s", conv.text(x))
            graph = self._frontend.graph(conv, part, conv.empty(part))
            self._searches[key] = _Search(self._time(partial(conv.by_torch, part), inf), graph.engines())
        search, out = self._searches[key], conv.empty(part)
        while True:
            if not self.learn:
                raise NotYet
            found = next(search.rest, None)
            if found is None:
                break
            engine, run = found
            best = min((search.alone, *(took for took, _ in search.timed)))
            search.timed.append((self._time(partial(run, part, conv.weight, out), best * _GIVE_UP), engine))
        del self._searches[key]
        return search.alone, sorted(search.timed, key=lambda pair: pair[0])

    def _lesson(self) -> AbstractContextManager[None]:
        return nullcontext() if self._learning is None else self._learning.lesson()

    def _time_often(self, work: Callable[[], object]) -> float:
        """Milliseconds of `work` several times, the host ahead of the device, so that its own time does not count."""
        if self._time(work, 0.0) == inf:  # Triton compiles; or it does not run
            return inf

        def often() -> None:
            for _ in range(_REPEATS):
                work()

        return self._time(often, inf)

    def _time(self, work: Callable[[], object], enough: float) -> float:
        """Milliseconds of `work`: of the first call, if that is `enough` or more, else the least of three more."""
        try:
            first = self._frontend.milliseconds(work)
            return first if first >= enough else min(self._frontend.milliseconds(work) for _ in range(3))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # an engine that fails to run is no engine
            logger.debug("an engine of cuDNN failed: %s", error)
            return inf


@dataclass(slots=True)
class _Search:
    """Args: alone: torch's milliseconds; rest: engines not timed yet; timed: milliseconds of the others."""

    alone: float
    rest: Iterator[tuple[Engine, Run]]
    timed: list[tuple[float, Engine]] = field(default_factory=list)


@cache
def _announce(folder: Path | None, *, at_once: bool) -> None:
    """Once a process, however many VAEs and sizes it has."""
    logger.warning(
        "timing cuDNN's engines, %s. The fastest are kept in %s; `wanshim warm` times them ahead of time, and with "
        "engines=False none is timed",
        "once for each size" if at_once else "in a tenth of the time of each call until the fastest are known",
        folder or "this process alone, for there is no home folder",
    )


def _direct(
    conv: Convolution,
    x: torch.Tensor,
    out: torch.Tensor,
    find: Callable[[Convolution, torch.Tensor, torch.Tensor], Run | None],
) -> Callable[[], None] | None:
    """A function that convolves `x` into `out`, piece by piece, by the runs of `find`; None: one is missing."""
    pieces = list(conv.pieces(x, out, conv.length(x)))
    found = [find(conv, *piece) for piece in pieces]
    runs = [run for run in found if run is not None]
    if len(runs) < len(pieces):
        return None

    def convolve() -> None:
        for run, (piece, part) in zip(runs, pieces):
            run(piece, conv.weight, part)

    return convolve


def _convolve_by(
    run: Run, x: torch.Tensor, weight: torch.Tensor, stride: tuple[int, ...], padding: tuple[int, ...]
) -> torch.Tensor:
    out = Convolution(weight, stride, padding).empty(x)
    with torch.cuda.device_of(x):
        run(x, weight, out)
    return out


def _takes(x: torch.Tensor) -> bool:
    return x.dtype in DTYPES and torch.backends.cudnn.enabled


def _sizes(conv: Convolution, x: torch.Tensor) -> tuple[Any, ...]:
    batch = x.shape[0] if conv.dim else 1
    size = (x.shape[1], *x.shape[-2:])
    return str(x.dtype), batch, size, tuple(conv.weight.shape), conv.stride, conv.padding


def engines_on(device: torch.device, share: float | None, dtype: torch.dtype) -> Engines | None:
    """The engines of `device`; None where torch's choice is all there is.

    Args:
        share: of the time of calls, for learning; None: the first call of a size learns all.
        dtype: of the weights; without the frontend there is a warning where it is one that engines take.
    """
    if device.type != "cuda" or torch.version.hip or not torch.backends.cudnn.is_available():
        return None
    try:
        table = engine_table(torch.cuda.get_device_capability(device))
        return Engines(Frontend(device), EngineStore(engine_folder(), table), Learning(share) if share else None)
    except FrontendMissing as reason:
        if dtype in DTYPES:
            _announce_missing(str(reason))
        return None


@cache
def _announce_missing(reason: str) -> None:
    """Once a process: who has a GPU and no frontend would otherwise never hear of it."""
    logger.warning(
        "%s. Convolutions run by the engine of cuDNN that torch takes; by the fastest a decode or encode takes 0.5 to "
        "0.8 of the time on an H100. Install one that serves: pip install 'wanshim[cudnn]'. engines=False stops this",
        reason,
    )
