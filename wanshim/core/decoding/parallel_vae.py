"""Runs a decode or an encode: agree, plan, execute, and leave every rank with the same answer or the same error."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from wanshim.core.decoding.model.encoder_graph import Graph
from wanshim.core.decoding.modes import MODES
from wanshim.core.decoding.modes.base import VaeRun, finisher
from wanshim.core.decoding.operators import fused
from wanshim.core.decoding.operators.base import FastOperators, Operators, StrictOperators
from wanshim.core.decoding.operators.engines import Engines, engines_on
from wanshim.core.decoding.operators.strict_checks import Checks
from wanshim.core.decoding.operators.strict_cuda import StrictCudaOperators
from wanshim.core.decoding.operators.strict_kernels import available
from wanshim.core.decoding.operators.weights import FastWeights
from wanshim.core.decoding.ranks.exchange import Comm, PeerLost, Verdict
from wanshim.core.decoding.ranks.output import OutputSpec, Sink, check_receivers
from wanshim.core.shared.digest import digest_weights, quick_digest
from wanshim.core.shared.gpu_memory import free_bytes
from wanshim.deadline import checked_seconds
from wanshim.errors import VaeDisagreement, VaeFailed, VaeInvalid, WanshimError

from .plan import TileSettings, VaeJob, VaePlan
from .planner import make_plans, possible_plans

logger = logging.getLogger("wanshim.decoding")
_OWN = ("free", "strict_cuda", "channels_first", "by_winograd")  # what may differ from rank to rank


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeOptions:
    """What a caller may choose.

    Args:
        mode: auto, temporal, spatial or, of a decode, tile.
        axis: what spatial mode splits: auto (the longer), height or width.
        strict: bit-identical to the framework where the mode allows it; False: the fast operators.
        engines: time cuDNN's engines once on this GPU, where its frontend is installed, and take the fastest; False:
            those that torch takes.
        chunk: latent frames per step of the fast operators; None: by memory.
        active: how many ranks of the group compute, the first ones; None: all. The others only receive.
        deadline: seconds in which a failing call ends on every rank.
        tiles: tile sizes, for mode tile.
        output: who receives what.

    Raises:
        DeadlineInvalid: `deadline` cannot be waited.
    """

    mode: str = "auto"
    axis: str = "auto"
    strict: bool = True
    engines: bool = True
    chunk: int | None = None
    active: int | None = None
    deadline: float = 120.0
    tiles: TileSettings = field(default_factory=TileSettings)
    output: OutputSpec = field(default_factory=OutputSpec)

    def __post_init__(self) -> None:
        checked_seconds(self.deadline, "deadline")


class ParallelVae:
    """Decodes latents, or encodes videos, on all ranks of a group. All ranks must call it, with the same input.

    Args:
        graph: the decoder or encoder; see `model/`.
        group: a torch.distributed process group; None: all ranks, or this process alone.
    """

    def __init__(self, graph: Graph, group: Any = None, options: VaeOptions | None = None) -> None:
        self.graph = graph
        self.group = group
        self.options = options if options is not None else VaeOptions()
        self.plan: VaePlan | None = None
        self._possible: tuple[VaeJob, list[VaePlan]] | None = None
        self._comm: Comm | None = None
        self._digested: tuple[list[int], str] = [], ""  # where weights lay, and their digest
        self._checks = Checks()
        self._weights: FastWeights | None = None
        self._engines: dict[torch.device, Engines | None] = {}
        self._load(graph.conv_in.current().weight.device)

    def __call__(
        self, given: torch.Tensor, *, tiles: TileSettings | None = None, lean: bool = False
    ) -> torch.Tensor | None:
        """Decode a latent, or encode a video.

        Returns:
            Of a latent [B, Z, t, h, w] frames [B, C, T, H, W] in -1..1 (or uint8); of a video [B, C, T, H, W] the mean
            and the logarithm of the variance [B, 2 Z, t, h, w]. None on a rank that keeps no output: it is not among
            the output's ranks, or a callback took the frames.

        Args:
            tiles: the caller's tile sizes, in place of the options'.
            lean: prefer the least memory: for callers that asked their framework for tiling.

        Raises:
            VaeInvalid: the request cannot be met (shape, mode, memory).
            VaeDisagreement: the ranks came with different requests.
            VaeRankAbsent: not all ranks called within the deadline; the next call of all ranks is not affected.
            VaeFailed: a rank failed on the way.
        """
        comm = self._connect(given.device)
        with comm.alone():
            return self._run(comm, given, tiles, lean)

    def _run(self, comm: Comm, given: torch.Tensor, tiles: TileSettings | None, lean: bool) -> torch.Tensor | None:
        job = self._agree(comm, given, tiles, lean)
        plans = self._plans(job)
        for attempt, plan in enumerate(plans):
            if attempt:
                comm.next_attempt()
                logger.warning("out of memory; all ranks go on with the next plan:\n%s", plan)
            self.plan = plan
            result, verdicts = self._attempt(comm, plan, job, given)
            if all(verdict.kind == "done" for verdict in verdicts):
                return result
            memory = all(verdict.kind in ("oom", "peer", "done") for verdict in verdicts)
            if not memory or attempt + 1 == len(plans) or not any(v.kind == "oom" for v in verdicts):
                raise _failure(self.graph, plan, comm.ranks, verdicts)
        raise AssertionError("make_plans returns at least one plan")

    def _plans(self, job: VaeJob) -> tuple[VaePlan, ...]:
        """The plans of `job`; to predict their memory takes milliseconds, which a call like the last one saves."""
        whatever_is_free = replace(job, free=None)
        if self._possible is None or self._possible[0] != whatever_is_free:
            self._possible = (whatever_is_free, possible_plans(self.graph, job))
        return make_plans(self.graph, job, self._possible[1])

    def release(self) -> None:
        """Close connections and put weights back as they were found. It can be used again."""
        if self._comm is not None:
            self._comm.close(idle=True)
            self._comm = None
        if self._weights is not None:
            self._weights.restore()
            self._weights = None

    def _connect(self, device: torch.device) -> Comm:
        if self._comm is None:
            comm = Comm(self.graph.verb, self.group, self.options.deadline, device)
            check_receivers(self.options.output.ranks, comm.size)
            self._comm = comm
        return self._comm

    # Agreement

    def _agree(self, comm: Comm, given: torch.Tensor, tiles: TileSettings | None, lean: bool) -> VaeJob:
        mine = {
            "call": self.graph.verb,
            "VAE": self.graph.name,
            "shape": list(given.shape),
            "dtype": str(given.dtype),
            "device": given.device.type,
            "compute": str(self._dtype(given)),
            **_plain_values(replace(self.options, tiles=tiles or self.options.tiles)),
            "lean": lean,
            "weights": self._weights_digest() if comm.size > 1 else None,
            self.graph.source: quick_digest(given) if comm.size > 1 else None,
            **dict.fromkeys(_OWN),
        }
        own = {
            "free": free_bytes(given.device),
            "strict_cuda": self._strict_cuda(given),
            "channels_first": self._checks.ways.channels_first(tuple(given.shape)),
            "by_winograd": self._by_winograd(given),
        }
        requests = comm.meet({**mine, **own})
        if any({**request, **dict.fromkeys(_OWN)} != mine for request in requests):
            raise _disagreement(self.graph, comm.ranks, requests)
        frees = [request["free"] for request in requests if request["free"] is not None]
        job = self._job(
            self._extent(given), comm.size, self._dtype(given).itemsize, min(frees, default=None), tiles, lean
        )
        known = [request["channels_first"] for request in requests]
        return replace(
            job,
            strict_cuda=all(request["strict_cuda"] for request in requests),
            by_winograd=any(request["by_winograd"] for request in requests),
            channels_first=None if None in known else tuple(sorted({name for names in known for name in names})),
        )

    def _weights_digest(self) -> str:
        """Of the weights that this rank computes with, read again where a framework has moved them."""
        convs = (conv.current() for conv in self.graph.convs())
        modules = (*convs, *(norm.module for norm in self.graph.norms()))
        tensors = [p for module in modules for p in module.parameters() if not p.is_meta]
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._digested[0]:
            text = json.dumps(digest_weights(tensors))
            self._digested = places, hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._digested[1]

    def _by_winograd(self, given: torch.Tensor) -> bool:
        fast = not self.options.strict and self._dtype(given).itemsize == 2
        return fast and self._engines_on(given.device) is not None

    def _extent(self, given: torch.Tensor) -> tuple[int, int, int, int, int]:
        graph = self.graph
        if given.dim() == 5 and given.shape[1] == graph.input_channels and min(given.shape) > 0:
            extent = graph.extent([int(size) for size in given.shape])
            if min(extent) > 0:
                return extent
        raise VaeInvalid(
            f"a {graph.source} of shape {list(given.shape)}",
            expected=f"[batch, {graph.input_channels}, frames, height, width], {graph.input_sizes}, for {graph.name}",
        )

    def _job(
        self,
        extent: tuple[int, int, int, int, int],
        ranks: int,
        itemsize: int,
        free: int | None,
        tiles: TileSettings | None,
        lean: bool,
    ) -> VaeJob:
        options, output = self.options, self.options.output
        out = 1 if output.uint8 else (self.graph.output_dtype.itemsize if self.graph.output_dtype else itemsize)
        return VaeJob(
            latent=extent,
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

    def _dtype(self, given: torch.Tensor) -> torch.dtype:
        kind = given.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return self.graph.dtype

    def _strict_cuda(self, given: torch.Tensor) -> bool:
        """Can this rank compute strictly in fewer passes? What has to be compared for that is compared here."""
        like = given.new_empty(0, dtype=self.graph.dtype)
        if not self.options.strict or torch.is_autocast_enabled(given.device.type) or not available(like):
            return False
        if not all(conv.current().weight.is_contiguous() for conv in self.graph.convs()):
            return False  # the framework's own sums are channels last then, and a norm of theirs adds in another order
        with torch.no_grad():
            return self._checks.prepare(self.graph, like, self._engines_on(given.device))

    # One attempt

    def _attempt(
        self, comm: Comm, plan: VaePlan, job: VaeJob, given: torch.Tensor
    ) -> tuple[torch.Tensor | None, list[Verdict]]:
        result: torch.Tensor | None = None
        interrupt: BaseException | None = None
        try:
            with torch.no_grad():
                result = self._execute(comm, plan, job, given)
            verdict = Verdict(rank=comm.rank, kind="done")
        except Exception as error:
            verdict = Verdict(rank=comm.rank, kind=_kind(error), text=f"{type(error).__name__}: {error}")
            logger.debug("rank %d left its %s", comm.rank, self.graph.verb, exc_info=True)
            traceback.clear_frames(error.__traceback__)  # lets go of every activation the failed attempt holds
        except BaseException as error:  # the peers get an interrupt's verdict too
            verdict = Verdict(rank=comm.rank, kind="error", text=type(error).__name__)
            interrupt = error
        if verdict.kind != "done":
            comm.close()
            _free(given.device)
        verdicts = comm.conclude(verdict)
        if interrupt is not None:
            raise interrupt
        if any(each.kind != "done" for each in verdicts):
            comm.close()
        return result, verdicts

    def _execute(self, comm: Comm, plan: VaePlan, job: VaeJob, given: torch.Tensor) -> torch.Tensor | None:
        mode = MODES[plan.mode]
        if mode.parallel:
            comm.connect()
        sink = self._sink(comm, plan, job, given)
        try:
            with self._operators(comm, plan, job, given) as ops:
                run = VaeRun(graph=self.graph, job=job, plan=plan, comm=comm, ops=ops, given=given, sink=sink)
                mode.run(run)
                comm.checkpoint(drain=True)
                return run.close()
        except BaseException:
            sink.cancel()
            raise

    @contextlib.contextmanager
    def _operators(self, comm: Comm, plan: VaePlan, job: VaeJob, given: torch.Tensor) -> Iterator[Operators]:
        if plan.strict and not job.strict_cuda:
            yield StrictOperators(plan.dim)
            return
        settle = partial(comm.checkpoint, drain=True)  # a host that waits for the GPU waits for a peer's message too
        if plan.strict:
            self._checks.ways.settle = settle
            yield StrictCudaOperators(self._checks, plan.dim)
            self._checks.ways.finished(tuple(given.shape))
            return
        engines = self._engines_on(given.device)
        if engines is not None:
            engines.settle = settle
        with self._ready(given) as weights, torch.autocast(given.device.type, enabled=False):
            if engines is None:
                yield FastOperators(weights, plan.dim)
            else:
                yield FastOperators(weights, plan.dim, engines, engines.by_winograd if plan.by_winograd else None)

    def _sink(self, comm: Comm, plan: VaePlan, job: VaeJob, given: torch.Tensor) -> Sink:
        spec = self.options.output
        if not MODES[plan.mode].parallel and (spec.ranks is None or comm.rank in spec.ranks):
            spec = replace(spec, ranks=(comm.rank,))  # each receiver computes for itself
        dtype = self.graph.output_dtype or self._dtype(given)
        return Sink(comm, spec, self.graph.output_shape(job.latent), finisher(self.graph), dtype, given.device)

    def _ready(self, given: torch.Tensor) -> FastWeights:
        dtype = self._dtype(given)
        if self._weights is None or self._weights.dtype != dtype:
            self._weights = FastWeights(self.graph, dtype)
        return self._weights

    def _load(self, device: torch.device) -> None:
        """Load what computes on `device` now, and not in the first call."""
        if self._engines_on(device) is not None and not self.options.strict:
            with torch.cuda.device(device):
                fused.load(device)

    def _engines_on(self, device: torch.device) -> Engines | None:
        if device not in self._engines:
            self._engines[device] = engines_on(device) if self.options.engines else None
        return self._engines[device]


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


def _plain_values(options: VaeOptions) -> dict[str, Any]:
    """The options as plain values, in one order everywhere; a callback counts only as being there."""
    output, tiles = options.output, options.tiles
    values = {
        each.name: getattr(options, each.name) for each in fields(options) if each.name not in ("tiles", "output")
    }
    values["tiles"] = f"{tiles.min_height}x{tiles.min_width} every {tiles.stride_height}x{tiles.stride_width}"
    values["output"] = "all ranks" if output.ranks is None else f"ranks {', '.join(map(str, output.ranks))}"
    values["frames"] = f"{'uint8' if output.uint8 else 'model dtype'}, {'in chunks' if output.on_chunk else 'whole'}"
    return values


def _disagreement(graph: Graph, ranks: list[int], requests: list[dict[str, Any]]) -> VaeDisagreement:
    """Each rank's value of what is not the same everywhere; the input's digest only where nothing else differs."""
    first = requests[0]
    keys = [key for key in first if key not in _OWN and any(each.get(key) != first.get(key) for each in requests)]
    if len(keys) > 1 and graph.source in keys:
        keys.remove(graph.source)
    rows = [
        f"rank {rank}: {', '.join(f'{key} {each.get(key)}' for key in keys)}" for rank, each in zip(ranks, requests)
    ]
    error = VaeDisagreement(
        f"the {len(ranks)} ranks of this {graph.verb} came with different requests: {'; '.join(rows)}",
        expected=f"the same {graph.source}, weights and options on every rank",
        hint=f"Give every rank the same {graph.source} and settings, and make the same calls on every rank",
    )
    error.differing = tuple(keys)
    return error


def _failure(graph: Graph, plan: VaePlan, ranks: list[int], verdicts: list[Verdict]) -> WanshimError:
    bad = [verdict for verdict in verdicts if verdict.kind != "done"]
    rows = "; ".join(f"rank {ranks[v.rank]}: {_NAMES[v.kind]}{': ' + v.text if v.text else ''}" for v in bad)
    memory = any(verdict.kind == "oom" for verdict in bad)
    return VaeFailed(
        f"{plan.mode} {graph.verb} on {plan.ranks} ranks failed on {len(bad)}: {rows}",
        expected="every rank to finish",
        hint="Use mode='auto', more ranks or uint8 output on one rank; the caches are clean and a retry may follow"
        if memory
        else "The first rank named with an error of its own is the cause; the caches are clean and a retry may follow",
    )


_NAMES = {"oom": "out of memory", "error": "failed", "peer": "lost its peer", "lost": "gone"}
