"""Decides how a decode runs. Pure: from the shape, the ranks and the memory free on the fullest rank to a plan.

Every rank calls this with the same agreed facts and gets the same list: the plan to run first, then the cheaper ones
to fall back to together when memory runs out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.modes.tile import TileSettings, assign, make_grid, needs_tiles
from wanshim.errors import DecodeInvalid

from .memory import Extent, working_bytes

MODES = ("auto", "temporal", "spatial", "tile")
_SPATIAL_OVERHEAD = 1.04  # halo exchanges, against the compute they sit between
_FIRST_FRAME = 0.32  # work of the video's first latent frame against any other
_RESERVE = 0.92  # share of the free memory a plan may use: the allocator fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """The facts of one decode, the same on every rank.

    Args:
        latent: [B, Z, T, H, W] of the latent.
        itemsize: bytes per value of the decode's dtype.
        ranks: how many ranks there are.
        active: how many of them decode, the first ones; None: all.
        free: bytes free on the rank with the least; None: unknown, taken as enough.
        chunk: latent frames per step; None: as many as memory allows.
        exact: the strict operators take fewer passes (`operators/strict_cuda.py`), and so less memory.
        lean: prefer the least memory over the least time (callers that asked for tiling).
        output_itemsize: bytes per value of the output, 0 where no rank keeps a whole video.
    """

    latent: tuple[int, int, int, int, int]
    itemsize: int
    ranks: int
    strict: bool
    active: int | None = None
    mode: str = "auto"
    axis: str = "auto"
    free: int | None = None
    chunk: int | None = None
    lean: bool = False
    exact: bool = False
    output_itemsize: int = 2
    tiles: TileSettings = field(default_factory=TileSettings)

    @property
    def workers(self) -> int:
        return self.ranks if self.active is None else max(1, min(self.active, self.ranks))

    def share(self, length: int) -> tuple[tuple[int, int], ...]:
        """`length` over the ranks that decode; the others get nothing."""
        return even_split(length, self.workers) + ((length, length),) * (self.ranks - self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """How a decode runs.

    Args:
        mode: single, temporal, spatial or tile.
        split: what each rank has: latent frames (temporal), rows or columns (spatial), the owners of tiles (tile).
        chunk: latent frames decoded per step.
        peak: predicted peak bytes per rank, on top of what was allocated before.
        exactness: against the framework's own decode.
        reason: why this plan.
    """

    mode: str
    strict: bool
    ranks: int
    axis: str | None
    split: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    chunk: int
    peak: tuple[int, ...]
    cost: float
    exactness: str
    reason: str

    def __str__(self) -> str:
        where = f" by {self.axis}" if self.axis else ""
        lines = [
            f"{self.mode}{where} on {self.ranks} rank{'s' * (self.ranks != 1)}, {self.exactness}",
            f"  split    {self._split_text()}; {self.chunk} latent frame{'s' * (self.chunk != 1)} per step",
            f"  memory   {', '.join(f'{peak / 2**30:.2f}' for peak in self.peak)} GiB predicted per rank",
            f"  why      {self.reason}",
        ]
        return "\n".join(lines)

    def _split_text(self) -> str:
        if self.mode == "single":
            return "none"
        if self.mode == "tile":
            counts = [self.owners.count(rank) for rank in range(self.ranks)]
            return f"{len(self.owners)} tiles, {' + '.join(str(count) for count in counts)}"
        unit = {"height": "latent rows", "width": "latent columns", None: "latent frames"}[self.axis]
        return f"{' + '.join(str(stop - start) for start, stop in self.split)} {unit}"


def make_plans(graph: DecoderGraph, job: DecodeJob) -> tuple[DecodePlan, ...]:
    """Plans that may serve `job`, the one to run first; the rest are the fallbacks, each cheaper in memory.

    Raises:
        DecodeInvalid: the mode or axis is unknown, or nothing fits in memory.
    """
    _check(graph, job)
    options = [plan for plan in _options(graph, job) if job.mode in ("auto", plan.mode) or _stands_in(graph, job, plan)]
    fitting = [plan for plan in options if job.free is None or max(plan.peak) <= job.free * _RESERVE]
    if not fitting:
        raise DecodeInvalid(_too_large(options, job), expected="a plan that fits", hint=_hint(job))
    exact = [plan for plan in fitting if plan.exactness != "approximate"]
    ordered = sorted(exact, key=lambda plan: (max(plan.peak), plan.cost) if job.lean else (plan.cost, max(plan.peak)))
    chosen = (ordered or fitting)[0]
    rest = [plan for plan in fitting if max(plan.peak) < max(chosen.peak)]
    rest.sort(key=lambda plan: (plan.exactness == "approximate", -max(plan.peak)))
    return (chosen, *_descending(rest))


def _options(graph: DecoderGraph, job: DecodeJob) -> list[DecodePlan]:
    plans: list[DecodePlan] = []
    for chunk in _chunks(job):
        if job.workers == 1:
            plans.append(_single(graph, job, chunk))
        else:
            plans.append(_spatial(graph, job, chunk))
    if job.workers > 1:
        plans.append(_temporal(graph, job))
        plans.append(_single(graph, job, 1))
    _, _, _, height, width = job.latent
    if needs_tiles(graph, job.tiles, height, width):
        plans.extend(_tile(graph, job, chunk) for chunk in _chunks(job))
    if job.mode != "auto" or not job.strict:
        return plans
    if job.lean:  # who asked for tiles never had the bits of the untiled decode, and gets its share of the work
        return [plan for plan in plans if job.workers == 1 or plan.mode != "single"]
    return [plan for plan in plans if plan.exactness == "bit-identical"]  # what strict promises


def _stands_in(graph: DecoderGraph, job: DecodeJob, plan: DecodePlan) -> bool:
    """One rank, or a picture no larger than a tile: the plain decode is what the mode comes to."""
    small = not needs_tiles(graph, job.tiles, job.latent[3], job.latent[4])
    return plan.mode == "single" and (small if job.mode == "tile" else job.workers == 1)


def _chunks(job: DecodeJob) -> tuple[int, ...]:
    frames = job.latent[2]
    if job.strict:
        return (1,)
    if job.chunk is not None:
        return (max(1, min(job.chunk, frames)),)
    return tuple(dict.fromkeys(min(chunk, frames) for chunk in (4, 2, 1)))


def _single(graph: DecoderGraph, job: DecodeJob, chunk: int) -> DecodePlan:
    b, _, t, h, w = job.latent
    peak = _working(
        graph, job, Extent(batch=b, frames=chunk, chunk=chunk, height=h, width=w, first=chunk == t), keeps=t > chunk
    )
    return _plan(
        graph,
        job,
        mode="single",
        chunk=chunk,
        peak=(peak,) * job.ranks,
        cost=_work(0, t) * (1 + 0.02 / chunk),
        reason="one rank decodes it whole" if job.ranks > 1 else "one rank, and the whole picture fits",
    )


def _temporal(graph: DecoderGraph, job: DecodeJob) -> DecodePlan:
    b, _, t, h, w = job.latent
    runs = job.share(t)
    peaks = [
        _working(
            graph,
            job,
            Extent(
                batch=b,
                frames=stop - start,
                chunk=1 if job.strict else stop - start,
                height=h,
                width=w,
                first=start == 0,
            ),
            keeps=False,
        )
        if stop > start
        else 0
        for start, stop in runs
    ]
    longest = max(stop - start for start, stop in runs)
    return _plan(
        graph,
        job,
        mode="temporal",
        split=runs,
        chunk=1 if job.strict else longest,
        peak=tuple(peaks),
        cost=max(_work(start, stop) for start, stop in runs) * 1.01,
        reason="fewest messages, attention stays local, every operator sees its single-device shape",
    )


def _spatial(graph: DecoderGraph, job: DecodeJob, chunk: int) -> DecodePlan:
    b, _, t, h, w = job.latent
    axis = job.axis if job.axis != "auto" else ("width" if w >= h else "height")
    length = w if axis == "width" else h
    bands = job.share(length)
    widest = max(stop - start for start, stop in bands)
    peaks = [
        _working(
            graph,
            job,
            Extent(
                batch=b,
                frames=chunk,
                chunk=chunk,
                height=stop - start if axis == "height" else h,
                width=stop - start if axis == "width" else w,
                first=chunk == t,
                halo_rows=axis == "height",
                halo_columns=axis == "width",
            ),
            keeps=t > chunk,
        )
        if stop > start
        else 0
        for start, stop in bands
    ]
    return _plan(
        graph,
        job,
        mode="spatial",
        axis=axis,
        split=bands,
        chunk=chunk,
        peak=tuple(peaks),
        cost=_work(0, t) * widest / length * (_SPATIAL_OVERHEAD + 0.04 / chunk),
        reason=f"memory shrinks with the ranks; {axis} is {'the longer axis' if job.axis == 'auto' else 'asked for'}",
    )


def _tile(graph: DecoderGraph, job: DecodeJob, chunk: int) -> DecodePlan:
    b, _, t, h, w = job.latent
    grid = make_grid(graph, job.tiles, h, w)
    owners = assign(grid.tiles, job.workers)
    one = max(grid.tiles, key=lambda tile: tile.work)
    top, bottom, left, right = one.latent
    extent = Extent(batch=b, frames=chunk, chunk=chunk, height=bottom - top, width=right - left, first=chunk == t)
    at_once = _working(graph, job, extent, keeps=t > chunk)
    peaks = []
    for rank in range(job.ranks):
        values = sum(tile.size[0] * tile.size[1] for tile in grid.tiles if owners[tile.index] == rank)
        held = b * values * graph.conv_out.out_channels * graph.frames(t) * job.itemsize
        peaks.append(at_once + held if values else 0)
    work = [sum(tile.work for tile in grid.tiles if owners[tile.index] == rank) for rank in range(job.ranks)]
    return _plan(
        graph,
        job,
        mode="tile",
        owners=owners,
        chunk=chunk,
        peak=tuple(peaks),
        cost=_work(0, t) * max(work) / (h * w) * 1.1,
        reason=f"the least memory: {len(owners)} overlapping tiles, blended; not equal to the untiled decode",
    )


def _plan(
    graph: DecoderGraph,
    job: DecodeJob,
    *,
    mode: str,
    chunk: int,
    peak: tuple[int, ...],
    cost: float,
    reason: str,
    axis: str | None = None,
    split: tuple[tuple[int, int], ...] = (),
    owners: tuple[int, ...] = (),
) -> DecodePlan:
    b, _, t, h, w = job.latent
    pixels = (graph.scale_s * graph.patch_size) ** 2 * h * w
    video = b * graph.image_channels * graph.frames(t) * pixels * job.output_itemsize
    bit_identical = job.strict and mode in ("single", "temporal")
    exactness = "approximate" if mode == "tile" else "bit-identical" if bit_identical else "within tolerance"
    return DecodePlan(
        mode=mode,
        strict=job.strict,
        ranks=job.ranks,
        axis=axis,
        split=split,
        owners=owners,
        chunk=chunk,
        peak=tuple(each + video for each in peak),
        cost=cost,
        exactness=exactness,
        reason=reason,
    )


def _working(graph: DecoderGraph, job: DecodeJob, extent: Extent, *, keeps: bool) -> int:
    passes = ("exact" if job.exact else "strict") if job.strict else "fast"
    return working_bytes(graph, extent, job.itemsize, passes, keeps_history=keeps)


def even_split(length: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut `length` into `parts` runs that differ by one at most, the longer ones first; empty runs come last."""
    size, extra = divmod(length, parts)
    bounds = [i * size + min(i, extra) for i in range(parts + 1)]
    return tuple(pairwise(bounds))


def _work(start: int, stop: int) -> float:
    return stop - start - (1 - _FIRST_FRAME) * (start == 0 and stop > 0)


def _descending(plans: list[DecodePlan]) -> list[DecodePlan]:
    """Only plans that need less than the one before: falling back must help."""
    kept: list[DecodePlan] = []
    for plan in plans:
        if not kept or max(plan.peak) < max(kept[-1].peak):
            kept.append(plan)
    return kept


def _check(graph: DecoderGraph, job: DecodeJob) -> None:
    if job.mode not in MODES:
        raise DecodeInvalid(f"decode mode {job.mode!r}", expected=f"one of {', '.join(MODES)}")
    if job.axis not in ("auto", "height", "width"):
        raise DecodeInvalid(f"spatial axis {job.axis!r}", expected="auto, height or width")
    if job.latent[1] != graph.latent_channels or min(job.latent) < 1:
        raise DecodeInvalid(
            f"a latent of shape {list(job.latent)}",
            expected=f"[batch, {graph.latent_channels}, frames, height, width], none of them 0, for {graph.name}",
        )


def _too_large(options: list[DecodePlan], job: DecodeJob) -> str:
    free = f"{(job.free or 0) / 2**30:.2f} GiB free on the fullest rank"
    needs = ", ".join(f"{plan.mode} {max(plan.peak) / 2**30:.2f} GiB" for plan in options)
    return f"no decode of {list(job.latent)} fits: {free}, predicted {needs}"


def _hint(job: DecodeJob) -> str:
    if job.strict:
        return "strict=False or mode='spatial' or 'tile' need less memory, and so do more ranks"
    return "Free memory on that rank (offload the transformer), use more ranks, or ask for uint8 output on one rank"
