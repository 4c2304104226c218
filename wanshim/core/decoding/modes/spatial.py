"""Spatial mode: each rank owns a band of rows or columns and computes chunk after chunk, as one device would.

Before a convolution with a halo, neighbours exchange one row (or column) of the new frames, point to point (one of
stride 2 reads beyond the end of its band alone). The
received edge becomes part of the window, and so of the history: older frames' edges never travel twice. Attention
keeps its queries local and gathers keys and values. Bands may differ in size; nothing is padded to fit, because a
padded latent changes the picture (attention reads the padding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from wanshim.core.decoding.model.graph import Graph
from wanshim.core.decoding.operators.window import Slab, Tokens, Window
from wanshim.core.decoding.plan import Mode, VaeJob, VaePlan, build_plan, frame_work, sizes_text, spans
from wanshim.core.decoding.ranks.exchange import Comm, begin_swap
from wanshim.core.decoding.ranks.output import Region

from .network import History, Request, VaeRun, run_in_order

_OVERHEAD = 1.04  # halo exchanges, against the compute they sit between


def _plans(graph: Graph, job: VaeJob) -> list[VaePlan]:
    return [_plan(graph, job, chunk) for chunk in job.chunks()] if job.workers > 1 else []


def _plan(graph: Graph, job: VaeJob, chunk: int) -> VaePlan:
    _, _, t, h, w = job.latent
    axis = job.axis if job.axis != "auto" else ("width" if w >= h else "height")
    length = w if axis == "width" else h
    bands = job.split(length)
    widest = max(stop - start for start, stop in bands)
    return build_plan(
        graph,
        job,
        mode="spatial",
        exactness="within tolerance",
        axis=axis,
        split=bands,
        split_text=sizes_text(bands, "latent columns" if axis == "width" else "latent rows"),
        chunk=chunk,
        peak=tuple(_peak(graph, job, chunk, axis, stop - start) for start, stop in bands),
        cost=frame_work(0, t) * widest / length * (_OVERHEAD + 0.04 / chunk),
        reason=f"memory shrinks with the ranks; {axis} is {'the longer axis' if job.axis == 'auto' else 'asked for'}",
    )


def _peak(graph: Graph, job: VaeJob, chunk: int, axis: str, band: int) -> int:
    if not band:
        return 0
    t, halo = job.latent[2], "halo_rows" if axis == "height" else "halo_columns"
    part = {axis: band, halo: True}
    return job.working_bytes(graph, frames=chunk, chunk=chunk, first=chunk == t, keeps_history=t > chunk, **part)


def _run(run: VaeRun) -> None:
    dim, scale = run.plan.dim, run.graph.output_scale
    assert dim is not None
    full = run.whole_picture(run.comm.rank)
    bands = [(start * scale, stop * scale) for start, stop in run.plan.split]
    regions = [
        Region(rank=rank, rows=band if dim == 3 else full.rows, columns=band if dim == 4 else full.columns)
        for rank, band in enumerate(bands)
        if band[0] < band[1]
    ]
    steps = spans(0, run.job.latent[2], run.plan.chunk)
    for (start, stop), patches in zip(steps, _compute_band(run, run.source(), dim, steps)):
        mine = [] if patches is None else [run.sink.finish(patches)]
        run.sink.deliver(run.graph.output_range(start, stop), regions, mine)
        run.comm.checkpoint()


def _compute_band(
    run: VaeRun, source: torch.Tensor, dim: int, steps: list[tuple[int, int]]
) -> Iterator[torch.Tensor | None]:
    """Compute this rank's band of `source`, the whole picture; one item per step."""
    start, stop = run.plan.split[run.comm.rank]
    if start == stop:
        yield from (None for _ in steps)
        return
    band = run.graph.cut(source, dim, start, stop)
    run.ops.ahead = neighbours = Neighbours(run.comm, run.plan.split, dim)
    yield from run_in_order(steps, partial(run.chunk, band), neighbours.answer)


class Neighbours:
    """Answers a band's requests: edges from the neighbours, tokens from all, the past from the own history.

    Edges that are there before the rest of their window travel while that is computed.
    """

    def __init__(self, comm: Comm, bands: tuple[tuple[int, int], ...], dim: int) -> None:
        self.comm = comm
        self.widths = [stop - start for start, stop in bands]
        self.dim = dim
        self.history = History()
        self._complete: Callable[[], None] | None = None  # of the exchange that has begun

    def slabs(self, window: Window) -> list[Slab]:
        last = window.shape()[self.dim] - 1
        return [Slab(self.dim, (0, last)[side], 1) for side, _ in self._receivers(window)]

    def begin(self, window: Window) -> None:
        self._complete = self._begin(window)

    def answer(self, request: Request, *, last: bool) -> torch.Tensor | None:
        if isinstance(request, Tokens):
            return self._gather(request)
        complete, self._complete = self._complete or self._begin(request), None
        complete()
        self.history.complete(request, last=last)
        return None

    def _begin(self, window: Window) -> Callable[[], None]:
        """Start to swap edges; the halos are there when what this returns was called."""
        edges = [(window.edge(self.dim, side), peer) for side, peer in self._receivers(window)]
        halos = [(window.halo(self.dim, side), peer) for side, peer in self._peers() if window.conv.halo[side]]
        return begin_swap(self.comm, window.conv.name, edges, halos)

    def _receivers(self, window: Window) -> list[tuple[int, int]]:
        """The sides of `window` that others read, and who does."""
        return [(side, peer) for side, peer in self._peers() if window.conv.halo[1 - side]]

    def _peers(self) -> list[tuple[int, int]]:
        return [(side, peer) for side, peer in ((0, self.comm.rank - 1), (1, self.comm.rank + 1)) if self._has(peer)]

    def _gather(self, tokens: Tokens) -> torch.Tensor:
        mine = tokens.data.contiguous()
        b, one, count, channels = mine.shape
        per_unit = count // self.widths[self.comm.rank]
        parts = [
            mine if rank == self.comm.rank else mine.new_empty((b, one, per_unit * width, channels))
            for rank, width in enumerate(self.widths)
        ]
        others = [rank for rank, width in enumerate(self.widths) if width and rank != self.comm.rank]
        self.comm.exchange(tokens.name, [(mine, rank) for rank in others], [(parts[rank], rank) for rank in others])
        return torch.cat(parts, 2)

    def _has(self, rank: int) -> bool:
        return 0 <= rank < self.comm.size and self.widths[rank] > 0


SPATIAL = Mode(name="spatial", plan=_plans, run=_run)
