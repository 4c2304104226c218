"""Runs a decode: agree, plan, execute, and leave every rank with the same answer or the same error."""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.modes import MODES
from wanshim.core.decoding.modes.base import DecodeRun
from wanshim.core.decoding.operators.base import FastOperators, Operators, StrictOperators
from wanshim.core.decoding.operators.strict_checks import Checks
from wanshim.core.decoding.operators.strict_cuda import StrictCudaOperators
from wanshim.core.decoding.operators.strict_kernels import available
from wanshim.core.decoding.operators.weights import FastWeights
from wanshim.core.decoding.ranks.exchange import Comm, PeerLost, Verdict
from wanshim.core.decoding.ranks.output import OutputSpec, Sink, check_receivers
from wanshim.core.shared.digest import digest
from wanshim.core.shared.gpu_memory import free_bytes
from wanshim.deadline import checked_seconds
from wanshim.errors import DecodeDisagreement, DecodeFailed, DecodeInvalid, WanshimError

from .plan import DecodeJob, DecodePlan, TileSettings
from .planner import make_plans

logger = logging.getLogger("wanshim.decoding")
_OWN = ("free", "strict_cuda")  # what may differ from rank to rank: the least of all counts


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """What a caller may choose.

    Args:
        mode: auto, temporal, spatial or tile.
        axis: what spatial mode splits: auto (the longer), height or width.
        strict: bit-identical to the framework where the mode allows it; False: the fast operators.
        chunk: latent frames per step of the fast operators; None: by memory.
        active: how many ranks of the group decode, the first ones; None: all. The others only receive.
        deadline: seconds in which a failing decode ends on every rank.
        tiles: tile sizes, for mode tile.
        output: who receives what.

    Raises:
        DeadlineInvalid: `deadline` cannot be waited.
    """

    mode: str = "auto"
    axis: str = "auto"
    strict: bool = True
    chunk: int | None = None
    active: int | None = None
    deadline: float = 120.0
    tiles: TileSettings = field(default_factory=TileSettings)
    output: OutputSpec = field(default_factory=OutputSpec)

    def __post_init__(self) -> None:
        checked_seconds(self.deadline, "deadline")


class ParallelDecoder:
    """Decodes latents on all ranks of a group. All ranks must call it, with the same latent.

    Args:
        graph: the decoder; see `graph.py`.
        group: a torch.distributed process group; None: all ranks, or this process alone.
    """

    def __init__(self, graph: DecoderGraph, group: Any = None, options: DecodeOptions | None = None) -> None:
        self.graph = graph
        self.group = group
        self.options = options if options is not None else DecodeOptions()
        self.plan: DecodePlan | None = None
        self._comm: Comm | None = None
        self._checks = Checks()
        self._weights: FastWeights | None = None

    def __call__(
        self, latent: torch.Tensor, *, tiles: TileSettings | None = None, lean: bool = False
    ) -> torch.Tensor | None:
        """Decode `latent` [B, Z, T, h, w] to frames [B, C, T', H, W] in -1..1 (or uint8).

        None on a rank that keeps no video: it is not among the output's ranks, or a callback took the frames.

        Args:
            tiles: the caller's tile sizes, in place of the options'.
            lean: prefer the least memory: for callers that asked their framework for tiling.

        Raises:
            DecodeInvalid: the request cannot be met (shape, mode, memory).
            DecodeDisagreement: the ranks came with different requests.
            DecodeRankAbsent: not all ranks called within the deadline; the next call of all ranks is not affected.
            DecodeFailed: a rank failed while decoding.
        """
        comm = self._connect(latent.device)
        with comm.alone():
            return self._decode(comm, latent, tiles, lean)

    def _decode(self, comm: Comm, latent: torch.Tensor, tiles: TileSettings | None, lean: bool) -> torch.Tensor | None:
        job = self._agree(comm, latent, tiles, lean)
        plans = make_plans(self.graph, job)
        for attempt, plan in enumerate(plans):
            if attempt:
                comm.next_attempt()
                logger.warning("out of memory; all ranks go on with the next plan:\n%s", plan)
            self.plan = plan
            result, verdicts = self._attempt(comm, plan, job, latent)
            if all(verdict.kind == "done" for verdict in verdicts):
                return result
            memory = all(verdict.kind in ("oom", "peer", "done") for verdict in verdicts)
            if not memory or attempt + 1 == len(plans) or not any(v.kind == "oom" for v in verdicts):
                raise _failure(plan, comm.ranks, verdicts)
        raise AssertionError("make_plans returns at least one plan")

    def release(self) -> None:
        """Close connections and put weights back as they were found. The decoder can be used again."""
        if self._comm is not None:
            self._comm.close(idle=True)
            self._comm = None
        if self._weights is not None:
            self._weights.restore()
            self._weights = None

    def _connect(self, device: torch.device) -> Comm:
        if self._comm is None:
            comm = Comm(self.group, self.options.deadline, device)
            check_receivers(self.options.output.ranks, comm.size)
            self._comm = comm
        return self._comm

    # Agreement

    def _agree(self, comm: Comm, latent: torch.Tensor, tiles: TileSettings | None, lean: bool) -> DecodeJob:
        mine = {
            "decoder": self.graph.name,
            "shape": list(latent.shape),
            "dtype": str(latent.dtype),
            "device": latent.device.type,
            "compute": str(self._dtype(latent)),
            **_plain_values(replace(self.options, tiles=tiles or self.options.tiles)),
            "lean": lean,
            "latent": digest(latent),
            **dict.fromkeys(_OWN),
        }
        own = {"free": free_bytes(latent.device), "strict_cuda": self._strict_cuda(latent)}
        requests = comm.meet({**mine, **own})
        if any({**request, **dict.fromkeys(_OWN)} != mine for request in requests):
            raise _disagreement(comm.ranks, requests)
        frees = [request["free"] for request in requests if request["free"] is not None]
        if latent.dim() != 5:
            raise DecodeInvalid(
                f"a latent of {latent.dim()} dimensions", expected="[batch, channels, frames, height, width]"
            )
        shape = tuple(int(size) for size in latent.shape)
        job = self._job(shape, comm.size, self._dtype(latent).itemsize, min(frees, default=None), tiles, lean)
        return replace(job, strict_cuda=all(request["strict_cuda"] for request in requests))

    def _job(
        self,
        shape: tuple[int, ...],
        ranks: int,
        itemsize: int,
        free: int | None,
        tiles: TileSettings | None,
        lean: bool,
    ) -> DecodeJob:
        options, output = self.options, self.options.output
        b, z, t, h, w = shape
        out = 1 if output.uint8 else (self.graph.output_dtype.itemsize if self.graph.output_dtype else itemsize)
        return DecodeJob(
            latent=(b, z, t, h, w),
            itemsize=itemsize,
            ranks=ranks,
            active=options.active,
            strict=options.strict,
            mode=options.mode,
            axis=options.axis,
            free=free,
            chunk=options.chunk,
            lean=lean,
            output_itemsize=0 if output.on_chunk is not None else out,
            tiles=tiles if tiles is not None else options.tiles,
        )

    def _dtype(self, latent: torch.Tensor) -> torch.dtype:
        kind = latent.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return self.graph.dtype

    def _strict_cuda(self, latent: torch.Tensor) -> bool:
        """Can this rank compute strictly in fewer passes? What has to be compared for that is compared here."""
        like = latent.new_empty(0, dtype=self.graph.dtype)
        if not self.options.strict or torch.is_autocast_enabled(latent.device.type) or not available(like):
            return False
        with torch.no_grad():
            return self._checks.prepare(self.graph, like)

    # One attempt

    def _attempt(
        self, comm: Comm, plan: DecodePlan, job: DecodeJob, latent: torch.Tensor
    ) -> tuple[torch.Tensor | None, list[Verdict]]:
        result: torch.Tensor | None = None
        interrupt: BaseException | None = None
        try:
            with torch.no_grad():
                result = self._execute(comm, plan, job, latent)
            verdict = Verdict(rank=comm.rank, kind="done")
        except Exception as error:
            verdict = Verdict(rank=comm.rank, kind=_kind(error), text=f"{type(error).__name__}: {error}")
            logger.debug("rank %d left its decode", comm.rank, exc_info=True)
            traceback.clear_frames(error.__traceback__)  # lets go of every activation the failed attempt holds
        except BaseException as error:  # the peers get an interrupt's verdict too
            verdict = Verdict(rank=comm.rank, kind="error", text=type(error).__name__)
            interrupt = error
        if verdict.kind != "done":
            comm.close()
            _free(latent.device)
        verdicts = comm.conclude(verdict)
        if interrupt is not None:
            raise interrupt
        if any(each.kind != "done" for each in verdicts):
            comm.close()
        return result, verdicts

    def _execute(self, comm: Comm, plan: DecodePlan, job: DecodeJob, latent: torch.Tensor) -> torch.Tensor | None:
        mode = MODES[plan.mode]
        if mode.parallel:
            comm.connect()
        sink = self._sink(comm, plan, job, latent)
        try:
            with self._operators(plan, job, latent) as ops:
                mode.run(DecodeRun(graph=self.graph, job=job, plan=plan, comm=comm, ops=ops, latent=latent, sink=sink))
            comm.checkpoint(drain=True)
            return sink.close()
        except BaseException:
            sink.cancel()
            raise

    @contextlib.contextmanager
    def _operators(self, plan: DecodePlan, job: DecodeJob, latent: torch.Tensor) -> Iterator[Operators]:
        if plan.strict:
            yield StrictCudaOperators(self._checks, plan.dim) if job.strict_cuda else StrictOperators(plan.dim)
            return
        with torch.autocast(latent.device.type, enabled=False), self._ready(latent) as weights:
            yield FastOperators(weights, plan.dim)

    def _sink(self, comm: Comm, plan: DecodePlan, job: DecodeJob, latent: torch.Tensor) -> Sink:
        b, _, t, h, w = job.latent
        pixels = self.graph.scale_s * self.graph.patch_size
        shape = (b, self.graph.image_channels, self.graph.frames(t), h * pixels, w * pixels)
        spec = self.options.output
        if not MODES[plan.mode].parallel and (spec.ranks is None or comm.rank in spec.ranks):
            spec = replace(spec, ranks=(comm.rank,))  # each receiver decodes for itself
        dtype = self.graph.output_dtype or self._dtype(latent)
        return Sink(comm, spec, shape, self.graph.patch_size, dtype, latent.device)

    def _ready(self, latent: torch.Tensor) -> FastWeights:
        dtype = self._dtype(latent)
        if self._weights is None or self._weights.dtype != dtype:
            self._weights = FastWeights(self.graph, dtype)
        return self._weights


def _kind(error: BaseException) -> str:
    if isinstance(error, PeerLost):
        return "peer"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error):
        return "oom"
    return "error"


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _plain_values(options: DecodeOptions) -> dict[str, Any]:
    """The options as plain values, in one order everywhere; a callback counts only as being there."""
    output, tiles = options.output, options.tiles
    values = {
        each.name: getattr(options, each.name) for each in fields(options) if each.name not in ("tiles", "output")
    }
    values["tiles"] = f"{tiles.min_height}x{tiles.min_width} every {tiles.stride_height}x{tiles.stride_width}"
    values["output"] = "all ranks" if output.ranks is None else f"ranks {', '.join(map(str, output.ranks))}"
    values["frames"] = f"{'uint8' if output.uint8 else 'model dtype'}, {'in chunks' if output.on_chunk else 'whole'}"
    return values


def _disagreement(ranks: list[int], requests: list[dict[str, Any]]) -> DecodeDisagreement:
    """Each rank's value of what is not the same everywhere; the latent's digest only where nothing else differs."""
    first = requests[0]
    keys = [key for key in first if key not in _OWN and any(each.get(key) != first.get(key) for each in requests)]
    if len(keys) > 1 and "latent" in keys:
        keys.remove("latent")
    rows = [
        f"rank {rank}: {', '.join(f'{key} {each.get(key)}' for key in keys)}" for rank, each in zip(ranks, requests)
    ]
    error = DecodeDisagreement(
        f"the {len(ranks)} ranks of this decode came with different requests: {'; '.join(rows)}",
        expected="the same latent and options on every rank",
        hint="Give every rank the same latent and settings, and let every rank of the group make the same calls",
    )
    error.differing = tuple(keys)
    return error


def _failure(plan: DecodePlan, ranks: list[int], verdicts: list[Verdict]) -> WanshimError:
    bad = [verdict for verdict in verdicts if verdict.kind != "done"]
    rows = "; ".join(f"rank {ranks[v.rank]}: {_NAMES[v.kind]}{': ' + v.text if v.text else ''}" for v in bad)
    memory = any(verdict.kind == "oom" for verdict in bad)
    return DecodeFailed(
        f"{plan.mode} decode on {plan.ranks} ranks failed on {len(bad)}: {rows}",
        expected="every rank to finish",
        hint="Use mode='auto', more ranks or uint8 output on one rank; the caches are clean and a retry may follow"
        if memory
        else "The first rank named with an error of its own is the cause; the caches are clean and a retry may follow",
    )


_NAMES = {"oom": "out of memory", "error": "failed", "peer": "lost its peer", "lost": "gone"}
