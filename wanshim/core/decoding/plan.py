"""A decode or encode as data: its facts on each rank, the job that all ranks agree on, and the plan for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import prod
from typing import Any

from wanshim.core.decoding.memory import Extent, working_bytes
from wanshim.core.decoding.model.graph import Graph

_FIRST_FRAME = 0.32  # work of the video's first latent frame against any other
_WINOGRAD_TIME = 0.7  # of a decode without, on an H200 (docs/measured/decode.md)
# A plan that takes more of the free memory begins without cached blocks: on an H100 and an H200 held to 8, 12 and 24
# GiB the second call of plans at 0.73 to 0.85 ran out among the fragments of the first.
_TIGHT = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSettings:
    """Tile size and stride in pixels of the finished picture; 256 and 192 are diffusers' defaults."""

    min_height: int = 256
    min_width: int = 256
    stride_height: int = 192
    stride_width: int = 192

    def __str__(self) -> str:
        return f"{self.min_height}x{self.min_width} every {self.stride_height}x{self.stride_width}"

    @classmethod
    def of(cls, vae: Any) -> TileSettings:
        """The sizes a VAE of diffusers' making carries, in pixels."""
        return cls(
            min_height=int(vae.tile_sample_min_height),
            min_width=int(vae.tile_sample_min_width),
            stride_height=int(vae.tile_sample_stride_height),
            stride_width=int(vae.tile_sample_stride_width),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """One call as one rank has it, made where the call enters and sent to the others as JSON.

    Args:
        asked: what must be the same on all ranks: the VAE, its input, the options; empty if making it failed.
        failed: why all ranks leave calls like it to the framework since one has failed; empty: none has.
        error: the kind and the text of what stopped this rank while it made the facts; empty: nothing did.
        left: why the framework must compute it; None: it need not.
        free, strict_cuda, channels_first, by_winograd: see `VaeJob`; of this rank.
        compare: it is time to compare the result with the framework's own again.
        compared: the kinds of calls that were compared (`VaePlan.kind`).
        frames: latent frames to compare.
    """

    asked: dict[str, Any]
    failed: str = ""
    error: Sequence[str] = ()
    left: str | None = None
    free: int | None = None
    strict_cuda: bool = False
    channels_first: Sequence[str] | None = None
    by_winograd: bool = False
    compare: bool = False
    compared: Sequence[str] = ()
    frames: int = 0

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeJob:
    """One decode or encode, the same on every rank.

    Args:
        latent: batch, channels of the input, and frames, height and width of the latent.
        itemsize: bytes per value of the dtype that it computes in.
        ranks: how many ranks there are.
        active: how many of them compute, the first ones; None: all.
        free: bytes free on the rank with the least; None: unknown, taken as enough.
        chunk: latent frames per step; None: as many as memory allows.
        strict_cuda: the strict operators take fewer passes (`operators/strict_cuda.py`), and so less memory.
        channels_first: the convolutions that they compute channels first, which takes more; None: unknown, so all.
        by_winograd: fast operators may use Winograd's method (`operators/winograd.py`), which takes more memory.
        lean: prefer the least memory over the least time (callers that asked for tiling).
        output_itemsize: bytes per value of the output, 0 where no rank keeps all of it.
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
    strict_cuda: bool = False
    channels_first: tuple[str, ...] | None = None
    by_winograd: bool = False
    output_itemsize: int = 2
    tiles: TileSettings = field(default_factory=TileSettings)

    @property
    def workers(self) -> int:
        return self.ranks if self.active is None else max(1, min(self.active, self.ranks))

    @property
    def passes(self) -> str:
        """The operators that compute it, as `memory.working_bytes` names them."""
        if not self.strict:
            return "fast"
        return "strict_cuda" if self.strict_cuda else "strict"

    def working_bytes(
        self, graph: Graph, *, frames: int, chunk: int, first: bool, keeps_history: bool, **part: Any
    ) -> int:
        """Peak bytes of holding `frames` latent frames of this job and computing `chunk` of them at once.

        Args:
            first, part: fields of `memory.Extent`; of a rank that computes a part of the picture, which part.
            keeps_history: other frames come before them.
        """
        b, _, _, h, w = self.latent
        whole = {"batch": b, "frames": frames, "chunk": chunk, "height": h, "width": w, "first": first}
        known = self.channels_first if self.strict_cuda else None
        return working_bytes(
            graph,
            Extent(**{**whole, **part}),
            self.itemsize,
            self.passes,
            keeps_history=keeps_history,
            channels_first=known,
            by_winograd=self.by_winograd,
        )

    def is_tight(self, plan: VaePlan) -> bool:
        """Whether `plan` takes so much of the free memory that fragments of it may not do."""
        return self.free is not None and max(plan.peak) > _TIGHT * self.free

    def chunks(self) -> tuple[int, ...]:
        """The numbers of latent frames per step that a mode may take, the most first."""
        frames = self.latent[2]
        if self.strict:
            return (1,)
        most = (8, 4, 2, 1) if self.chunk is None else (max(1, self.chunk),)
        return tuple(dict.fromkeys(longest(spans(0, frames, chunk)) for chunk in most))

    def split(self, length: int) -> tuple[tuple[int, int], ...]:
        """`length` over the ranks that compute; the others get nothing."""
        return even_split(length, self.workers) + ((length, length),) * (self.ranks - self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class VaePlan:
    """The plan of a decode or an encode.

    Args:
        mode: a name in `modes.MODES`.
        axis: what is split in space: height, width or None.
        split: what each rank has: latent frames (temporal), rows or columns (spatial).
        owners: the rank of each tile (tile).
        split_text: what each rank has, in words.
        chunk: latent frames computed per step.
        peak: predicted peak bytes per rank, on top of what was allocated before.
        cost: predicted time, in latent frames that one rank computes.
        exactness: what is promised against the framework's own result: strict (its bits), within tolerance or
            approximate.
        reason: why this plan.
        by_winograd: convolutions may use Winograd's method.
        without_tiles: the caller asked for tiling, and gets this instead.
        compared: what of a result was found equal to the framework's own, bit by bit; empty: nothing yet.
        tries: before the first call, whose size decides: the modes of which one is taken; empty: this is a call's plan.
    """

    mode: str
    strict: bool
    ranks: int
    axis: str | None = None
    split: tuple[tuple[int, int], ...] = ()
    owners: tuple[int, ...] = ()
    split_text: str = "none"
    chunk: int
    peak: tuple[int, ...]
    cost: float
    exactness: str
    reason: str
    by_winograd: bool = False
    without_tiles: bool = False
    compared: str = ""
    tries: tuple[str, ...] = ()

    @property
    def dim(self) -> int | None:
        """The dimension of the latent that `axis` names."""
        return {"height": 3, "width": 4, None: None}[self.axis]

    def kind(self, job: VaeJob) -> str:
        """The calls of one size for which one comparison with the framework is valid."""
        return f"{self.mode} {self.split} {job.passes}"

    def __str__(self) -> str:
        where = f" by {self.axis}" if self.axis else ""
        head = f"{self.mode}{where} on {self.ranks} rank{'s' * (self.ranks != 1)}, {self.claim}"
        if self.tries:
            return f"{head}\n  tries    {', '.join(self.tries)}: {self.reason}"
        lines = [
            head,
            f"  split    {self.split_text}; {self.chunk} latent frame{'s' * (self.chunk != 1)} per step",
            f"  memory   {', '.join(f'{peak / 2**30:.2f}' for peak in self.peak)} GiB predicted per rank",
            f"  why      {self.reason}",
        ]
        if self.compared:
            lines.append(f"  compared {self.compared}, equal to the framework's own")
        if self.without_tiles:
            lines.append(
                "  tiles    asked for and replaced: the result has no seams and is not the framework's tiled one"
            )
        return "\n".join(lines)

    @property
    def claim(self) -> str:
        """The promise of this plan, and whether it was compared with the framework's own result."""
        if not self.strict:
            return self.exactness
        return f"{self.exactness}, {'compared' if self.compared else 'not compared'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to decode and to encode.

    Args:
        name: what a caller asks for, and what a plan says.
        plan: the plans of this mode for a job, the largest chunk first; none where it does not apply.
        run: runs a plan (`modes.network.VaeRun`). Every rank calls it and hands the same regions to the sink.
        parallel: the ranks work together. False: each receiver computes everything, and no caller asks for it by name.
        encodes: it can encode too.
    """

    name: str
    plan: Callable[[Any, VaeJob], list[VaePlan]]
    run: Callable[[Any], None]
    parallel: bool = True
    encodes: bool = True


def build_plan(
    graph: Graph, job: VaeJob, *, mode: str, exactness: str, peak: tuple[int, ...], cost: float, **fields: Any
) -> VaePlan:
    """A mode's plan for `job`; to the `peak` of each rank's computation it adds the output that the rank keeps.

    Args:
        exactness: with the strict operators; the fast ones are within tolerance at best.
        fields: the other fields of the plan that are the mode's.
    """
    output = prod(graph.output_shape(job.latent)) * job.output_itemsize
    if exactness == "strict" and not job.strict:
        exactness = "within tolerance"
    return VaePlan(
        mode=mode,
        strict=job.strict,
        ranks=job.ranks,
        peak=tuple(each + output for each in peak),
        cost=cost * (_WINOGRAD_TIME if job.by_winograd else 1.0),
        exactness=exactness,
        by_winograd=job.by_winograd,
        without_tiles=job.lean and mode != "tile",
        **fields,
    )


def even_split(length: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut `length` into `parts` runs that differ by one at most, the longer ones first; empty runs come last."""
    size, extra = divmod(length, parts)
    bounds = [i * size + min(i, extra) for i in range(parts + 1)]
    return tuple(pairwise(bounds))


def spans(start: int, stop: int, most: int) -> list[tuple[int, int]]:
    """`start` to `stop` in steps of at most `most`, as even as they can be."""
    runs = even_split(stop - start, -(-(stop - start) // most)) if stop > start else ()
    return [(start + first, start + last) for first, last in runs]


def longest(runs: Iterable[tuple[int, int]]) -> int:
    """The length of the longest of `runs`."""
    return max(stop - start for start, stop in runs)


def sizes_text(split: tuple[tuple[int, int], ...], unit: str) -> str:
    """The sizes of a split in words: "6 + 5 + 5 latent frames"."""
    return f"{' + '.join(str(stop - start) for start, stop in split)} {unit}"


def frame_work(start: int, stop: int) -> float:
    """The time of latent frames `start` to `stop`, in frames after the first."""
    return stop - start - (1 - _FIRST_FRAME) * (start == 0 and stop > 0)
