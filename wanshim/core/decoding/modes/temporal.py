"""Temporal mode: each rank owns a run of latent frames and all ranks go through the layers together.

A causal convolution needs the last two input frames of the rank before, so one message per convolution and boundary
is all the traffic of a decode (32 for Wan, against some 700 to 1000 halo rounds of a split in space), attention needs
none, and height and width may be anything. Looking back by overlap instead would take 37 latent frames. An encode is
the same in the other direction (24 messages; by overlap, over 100 frames of the video). Every operator
sees the shapes it sees on one device, which is why strict operators stay bit-identical. The price is memory: a rank
holds a layer's activations for its whole run.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from wanshim.core.decoding.model.graph import Graph
from wanshim.core.decoding.operators.window import Slab, Window
from wanshim.core.decoding.plan import Mode, VaeJob, VaePlan, build_plan, frame_work, sizes_text, spans
from wanshim.core.decoding.ranks.exchange import Comm, begin_swap

from .network import VaeRun, run_in_lockstep


def _plans(graph: Graph, job: VaeJob) -> list[VaePlan]:
    if job.workers == 1:
        return []
    runs = job.split(job.latent[2])
    return [
        build_plan(
            graph,
            job,
            mode="temporal",
            exactness="strict",
            split=runs,
            split_text=sizes_text(runs, "latent frames"),
            chunk=1 if job.strict else max(stop - start for start, stop in runs),
            peak=tuple(_peak(graph, job, start, stop) for start, stop in runs),
            cost=max(frame_work(start, stop) for start, stop in runs) * 1.01,
            reason="fewest messages, attention stays local, every operator sees its single-device shape",
        )
    ]


def _peak(graph: Graph, job: VaeJob, start: int, stop: int) -> int:
    if start == stop:
        return 0
    frames = stop - start
    chunk = 1 if job.strict else frames
    return job.working_bytes(graph, frames=frames, chunk=chunk, first=start == 0, keeps_history=False)


def _run(run: VaeRun) -> None:
    chunk, graph, sink = run.plan.chunk, run.graph, run.sink
    computed = iter(_compute_frames(run, run.source()))
    run.comm.checkpoint()
    for rank, (start, stop) in enumerate(run.plan.split):
        for a, b in spans(start, stop, chunk):
            mine = [sink.finish(next(computed))] if rank == run.comm.rank else []
            sink.deliver(graph.output_range(a, b), [run.whole_picture(rank)], mine)


def _compute_frames(run: VaeRun, source: torch.Tensor) -> list[torch.Tensor]:
    """Compute this rank's run of latent frames, chunk by chunk side by side."""
    runs, comm = run.plan.split, run.comm
    chunks = [run.chunk(source, a, b) for a, b in spans(*runs[comm.rank], run.plan.chunk)]
    if not chunks:
        return []
    relay = Relay(comm, last=max(rank for rank, (start, stop) in enumerate(runs) if start < stop))
    run.ops.ahead = relay if len(chunks) == 1 else None
    return run_in_lockstep(chunks, relay.complete)


class Relay:
    """Takes each convolution's past from the rank before and gives its tail to the rank after.

    The tail of a run that is one window travels while the rest of the window is computed.
    """

    def __init__(self, comm: Comm, last: int) -> None:
        self.comm = comm
        self.last = last
        self._complete: Callable[[], None] | None = None  # of the exchange that has begun

    def slabs(self, window: Window) -> list[Slab]:
        history = window.conv.history
        sends = self.comm.rank < self.last and 0 < history <= window.frames
        return [Slab(2, window.frames - history, history)] if sends else []

    def begin(self, window: Window) -> None:
        if 0 < window.conv.history <= window.frames:
            self._complete = self._begin(window, window.tail())

    def complete(self, windows: list[Window]) -> None:
        """Fill the past of a layer's windows, in the order of time."""
        history = windows[0].conv.history
        if not history:
            return
        has_tail = sum(window.frames for window in windows) >= history
        begun, self._complete = self._complete, None
        complete = begun or self._begin(windows[0], _last_frames(windows) if has_tail else None)
        complete()
        if self.comm.rank == 0:
            windows[0].past().zero_()
        for before, window in pairwise(windows):
            window.past().copy_(before.tail())
        if not has_tail:  # the run is shorter than the past it hands on: what came from before goes through
            self._to_after(windows[0].conv.name, windows[-1].tail())
        self.comm.checkpoint()  # a layer of a whole run is many launches

    def _begin(self, window: Window, tail: torch.Tensor | None) -> Callable[[], None]:
        """Start to give `tail` on and to take the past of `window`; that is there when what this returns was called."""
        rank = self.comm.rank
        sends = [(tail, rank + 1)] if tail is not None and rank < self.last else []
        return begin_swap(self.comm, window.conv.name, sends, [(window.past(), rank - 1)] if rank else [])

    def _to_after(self, name: str, tail: torch.Tensor) -> None:
        if self.comm.rank < self.last:
            begin_swap(self.comm, name, [(tail, self.comm.rank + 1)], [])()


def _last_frames(windows: list[Window]) -> torch.Tensor:
    """The last frames of the run, from own frames alone."""
    last, history = windows[-1], windows[-1].conv.history
    if last.frames >= history:
        return last.tail()
    fresh = [window.fresh() for window in windows[-history:]]
    return torch.cat(fresh, 2)[:, :, -history:]


TEMPORAL = Mode(name="temporal", plan=_plans, run=_run)
