"""Runs a decode or an encode: agree, plan, execute, and leave every rank with the same answer or the same error."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from wanshim.core.decoding.model.encoder_graph import Graph
from wanshim.core.decoding.model.framework import VaeFallback
from wanshim.core.decoding.modes import MODES, SINGLE
from wanshim.core.decoding.modes.base import VaeRun, finisher
from wanshim.core.decoding.operators.base import FastOperators, Operators, StrictOperators
from wanshim.core.decoding.operators.engines import Engines, engines_on
from wanshim.core.decoding.operators.kernel_compiler import (
    BY_ANY,
    BY_TORCH,
    COMPILER,
    Call,
    Kernel,
    by_engines,
    calls_seen,
    is_usual,
    kernel_set,
    missing,
    needed,
    patience,
)
from wanshim.core.decoding.operators.learning import SHARE
from wanshim.core.decoding.operators.strict_checks import Checks, keep_dtype, sizes_of
from wanshim.core.decoding.operators.strict_convolutions import conv_flags, default_flags
from wanshim.core.decoding.operators.strict_cuda import StrictCudaOperators
from wanshim.core.decoding.operators.strict_kernels import available
from wanshim.core.decoding.operators.weights import FastWeights
from wanshim.core.decoding.ranks.exchange import Comm, PeerLost, Verdict
from wanshim.core.decoding.ranks.output import OutputSpec, Sink, check_receivers
from wanshim.core.shared.digest import digest, digest_weights
from wanshim.core.shared.fallback import cause_of
from wanshim.core.shared.gpu_memory import free_bytes, give_back, is_memory, release_cached
from wanshim.core.shared.recent import Recent
from wanshim.errors import ModelInvalid, RankAbsent, RankDisagreement, RanksFailed
from wanshim.values import checked_seconds

from .plan import TileSettings, VaeJob, VaePlan
from .planner import is_tight, make_plans, possible_plans
from .proof import Comparison, Standing, kind_of, promises_bits

logger = logging.getLogger("wanshim.decoding")
NOT_COMPILED = "its kernels are being compiled beside it, once on this machine; later calls take them"
AFTER_ABSENCE = 5.0  # seconds
_LARGE = (9, 128, 128)  # latent frames, height and width, for which every mode has a plan
# What may differ from rank to rank.
_OWN = ("free", "strict_cuda", "channels_first", "by_winograd", "left", "compare", "compared", "frames", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeOptions:
    """What a caller may choose.

    Args:
        mode: auto, temporal, spatial or, of a decode, tile.
        axis: what spatial mode splits: auto (the longer), height or width.
        strict: the framework's own bits where the mode allows it, which is compared (`proof.py`); False: the fast
            operators.
        engines: time cuDNN's engines once on this GPU, where its frontend is installed, and take the fastest; False:
            those that torch takes.
        chunk: latent frames per step of the fast operators; None: by memory.
        active: how many ranks of the group compute, the first ones; None: all. The others only receive.
        deadline: seconds in which a failing call ends on every rank.
        tiles: tile sizes, for mode tile.
        output: who receives what.

    Raises:
        SettingInvalid: `deadline` cannot be waited.
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
        group: a torch.distributed process group, or a `LocalGroup`; None: all ranks, or this process alone.
        learning: what share of the time of calls may go into timing engines; None: the first call of a size times all,
            and kernels are compiled within calls.
    """

    def __init__(
        self, graph: Graph, group: Any = None, options: VaeOptions | None = None, learning: float | None = SHARE
    ) -> None:
        self.graph = graph
        self._learning = learning
        self.group = group
        self.options = options if options is not None else VaeOptions()
        self.plan: VaePlan | None = None
        self._possible: tuple[VaeJob, list[VaePlan]] | None = None
        self._delivered = False  # a callback has frames of this call
        self.missed = False  # a rank did not come to the last call
        self._comm: Comm | None = None
        # Place and version of each weight, and the digest of all.
        self._digested: tuple[list[tuple[int, int]], str] = [], ""
        self._checks = Checks() if graph.framework is None else Checks(graph.framework.is_replaced)
        self._weights: FastWeights | None = None
        self._engines: dict[torch.device, Engines | None] = {}
        self._kernels: dict[tuple[torch.device, torch.dtype], dict[Call, list[Kernel]]] = {}
        self._said_tiles = False
        self._standings: Recent[tuple[Any, ...], Standing] = Recent(256)
        device = graph.conv_in.current().weight.device
        self._engines_on(device)  # loads cuDNN's frontend now, and not in the first call
        self._kernels_ahead(device, graph.dtype)

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
            VaeFallback: the framework computes something that the graph does not, strict was not equal to it, or its
                kernels are not compiled yet.
            ModelInvalid: the request cannot be met (shape, mode, memory).
            RankDisagreement: the ranks came with different requests.
            RankAbsent: not all ranks called within the deadline; the next call of all ranks is not affected.
            RanksFailed: a rank failed on the way.
        """
        comm, engines = self._connect(given.device), self._engines_on(given.device)
        self._delivered = False
        with comm.alone(), contextlib.nullcontext() if engines is None else engines.call():
            return self._run(comm, given, tiles, lean)

    def _run(self, comm: Comm, given: torch.Tensor, tiles: TileSettings | None, lean: bool) -> torch.Tensor | None:
        job, requests = self._agree(comm, given, tiles, lean)
        with COMPILER.paused():
            return self._run_plans(comm, given, job, requests)

    def _run_plans(
        self, comm: Comm, given: torch.Tensor, job: VaeJob, requests: Sequence[dict[str, Any]]
    ) -> torch.Tensor | None:
        """By the first plan for which memory suffices."""
        standing = self._standing(given)
        standing.frames = max(request["frames"] for request in requests)  # a rank's weights may be laid otherwise
        plans = self._plans(job)
        for attempt, plan in enumerate(plans):
            if attempt:
                comm.next_attempt()
                logger.warning("out of memory; all ranks go on with the next plan:\n%s", plan)
            elif is_tight(plan, job):
                release_cached(given.device)
            kind = kind_of(plan, job)
            again = any(request["compare"] or kind not in request["compared"] for request in requests)
            whole = self._compares(plan) and again and self._keeps_frames(plan, job, standing)
            self.plan = replace(plan, compared=standing.compared.get(kind, ""))
            if self.plan.without_tiles and not self._said_tiles:
                self._said_tiles = True
                logger.warning("tiling was asked for, and is replaced by:\n%s", self.plan)
            if self._compares(plan) and again and not whole and not self._rehearse(comm, plan, job, given, standing):
                raise self._unequal(job, given, standing)
            result, verdicts = self._attempt(comm, plan, job, given, self.options.output, standing if whole else None)
            self.plan = replace(plan, compared=standing.compared.get(kind, ""))
            if all(verdict.kind == "done" for verdict in verdicts):
                standing.calls_left -= 1
                return result
            if all(verdict.kind in ("done", "unequal") for verdict in verdicts):
                raise self._unequal(job, given, standing)
            memory = all(verdict.kind in ("oom", "peer", "done") for verdict in verdicts)
            if not memory or attempt + 1 == len(plans) or not any(v.kind == "oom" for v in verdicts):
                raise self._failed(comm, verdicts, standing, plan)
        raise AssertionError("make_plans returns at least one plan")

    def _failed(
        self, comm: Comm, verdicts: Sequence[Verdict], standing: Standing, plan: VaePlan | None = None
    ) -> RanksFailed:
        """The error that all ranks raise. The next call like this one fails at once if the cause stays: it was neither
        memory, nor a rank that is gone, nor the user's interrupt or callback."""
        error = _failure(self.graph, plan, comm.ranks, verdicts)
        error.left_to_framework = not self._delivered
        if any(verdict.kind == "error" for verdict in verdicts):
            standing.failed = error.found
        return error

    def untried(self) -> VaePlan:
        """What is known of a call before the first: which modes may be taken. Its size decides among them."""
        together = dist.is_available() and dist.is_initialized()
        ranks = max(1, dist.get_world_size(self.group)) if together else 1
        extent = (1, self.graph.input_channels, *_LARGE)
        plans = possible_plans(self.graph, self._job(extent, ranks, self.graph.dtype.itemsize, None, None, False))
        return replace(
            min(plans, key=lambda plan: plan.cost),
            mode=self.options.mode,
            axis=None,
            tries=tuple(dict.fromkeys(plan.mode for plan in plans)),
            reason=f"the fastest that fits in memory at the size of the first {self.graph.verb}",
        )

    # Comparison with the framework's own

    def refuse_traced(self, *given: Any) -> None:
        """Raise VaeFallback where more is wanted than values: gradients of the input or of the weights, for which a
        call keeps no graph, or what torch.func or a tensor of another class, such as a fake one, makes of each step."""
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise VaeFallback(f"the {self.graph.source} wants gradients")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise VaeFallback(f"the {self.graph.verb} is called inside torch.func or torch.vmap")
        strange = [type(x) for x in tensors if type(x) not in (torch.Tensor, torch.nn.Parameter)]
        if strange:
            raise VaeFallback(f"the {self.graph.source} is a {strange[0].__module__}.{strange[0].__qualname__}")
        if self.graph.framework is not None and self.graph.framework.trains():
            raise VaeFallback(
                "weights of the VAE want gradients: call it under torch.no_grad() if they are not trained"
            )

    def as_asked(self, frames: torch.Tensor) -> torch.Tensor:
        """The framework's frames as `options.output` has them; without elements on a rank that gets none."""
        output, comm = self.options.output, self._connect(frames.device)
        if output.ranks is not None and comm.rank not in output.ranks:
            return frames.new_empty(0)
        if output.uint8:
            frames = frames.float().clamp(-1.0, 1.0).add_(1.0).mul_(127.5).round_().to(torch.uint8)
        if output.on_chunk is None:
            return frames
        output.on_chunk(frames, 0)
        return frames.new_empty(0)

    def _standing(self, given: torch.Tensor) -> Standing:
        """What is known of calls like this one."""
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # the older switch may not be readable
        flags = (*conv_flags(), *(each.fp32_precision for each in backends))
        autocast = torch.is_autocast_enabled(given.device.type)
        laid = all(conv.module.weight.is_contiguous() for conv in self.graph.convs())
        key = (given.shape, given.dtype, given.device, self._dtype(given), *given.stride(), *flags, autocast, laid)
        if key not in self._standings:
            # Values or weights laid channels last take the framework through other kernels, some in later frames alone.
            plain = given.is_contiguous() or not given.is_contiguous(memory_format=torch.channels_last_3d)
            self._standings[key] = Standing() if plain and laid else Standing(frames=given.shape[2])
        return self._standings[key]

    def _compares(self, plan: VaePlan) -> bool:
        return promises_bits(plan) and self.graph.framework is not None and self.graph.framework.known

    def _keeps_frames(self, plan: VaePlan, job: VaeJob, standing: Standing) -> bool:
        """Does each rank hold a result that can be compared, of work with the other ranks too?"""
        plain = self.options.output == OutputSpec()
        return plain and (not MODES[plan.mode].parallel or standing.frames_of(job) == job.latent[2])

    def _rehearse(self, comm: Comm, plan: VaePlan, job: VaeJob, given: torch.Tensor, standing: Standing) -> bool:
        """Make a short call of the same kind and compare it; is it equal on all ranks, or could nothing be compared?"""
        b, c, _, h, w = job.latent
        frames = standing.frames_of(job)
        short = replace(job, latent=(b, c, frames, h, w), output_itemsize=self._dtype(given).itemsize)
        mode = MODES[plan.mode]
        short_plan = (mode.plan(self.graph, short) or SINGLE.plan(self.graph, short))[-1]
        first, own = self.graph.cut(given, 2, 0, frames), Standing(frames=frames)
        _, verdicts = self._attempt(comm, short_plan, short, first, OutputSpec(), own)
        comm.next_attempt()
        kinds = {verdict.kind for verdict in verdicts}
        if kinds <= {"done", "unequal"}:
            found = next(iter(own.compared.values()), "")
            text = f"the first {frames} of {job.latent[2]} latent frames" if found else ""
            standing.passed(kind_of(plan, job), text, job)
        elif not kinds <= {"done", "unequal", "oom", "peer"}:
            raise self._failed(comm, verdicts, standing, plan)
        elif "unequal" not in kinds:  # it must not fail the call; the next one tries again
            logger.info("not compared with the framework's own: %s", _failures(comm.ranks, verdicts))
        return "unequal" not in kinds

    def _unequal(self, job: VaeJob, given: torch.Tensor, standing: Standing) -> VaeFallback:
        """These operators are off for calls like this one; the next call tries the plainer ones, if there are any."""
        standing.unequal.add(job.passes)
        standing.compared.clear()
        return VaeFallback(self._not_equal(given))

    def _not_equal(self, given: torch.Tensor) -> str:
        what = f"a {self.graph.source} of {list(given.shape)} in {str(self._dtype(given)).removeprefix('torch.')}"
        return f"strict was not equal for {what}: the framework's own"

    def _why_uncast(self, given: torch.Tensor) -> str | None:
        """Why this input is the framework's, which may refuse it by an error of its own: the graph casts none."""
        if given.dtype == self._dtype(given) or torch.is_autocast_enabled(given.device.type):
            return None
        return f"a {self.graph.source} in {given.dtype}, and weights in {self.graph.dtype}"

    def _why_left(self, given: torch.Tensor) -> str | None:
        """Why the framework must compute this itself, on every rank."""
        if self.options.strict and "strict" in self._standing(given).unequal:
            return self._not_equal(given)
        if self.graph.framework is None:
            return None
        reason = self.graph.framework.why_not_plain()
        if reason is not None or (self.options.strict and self._casts(given)):
            return reason  # where autocast casts, strict takes the framework's own steps, without kernels
        kernels = self._kernels_ahead(given.device, self._dtype(given))
        if not kernels or given.dim() != 5:  # another number of dimensions is refused later
            return None
        name = kernel_set(self.graph, given.shape, strict=self.options.strict)
        ways = self._ways(given.device, self._dtype(given))
        usual = default_flags() and is_usual(self.graph, given.shape) and (name, ways[0]) in kernels
        launched = kernels.get((name, ways[0] if usual else ways[-1]), [])
        soon = patience(self.graph, given.shape)
        return NOT_COMPILED if missing(launched, self.options.deadline / 2, soon) else None

    def wait_for_kernels(self) -> None:
        """Wait for the kernels that are being compiled beside the program."""
        for calls in self._kernels.values():
            for kernel in chain.from_iterable(calls.values()):
                kernel.done.wait()

    def _plans(self, job: VaeJob) -> tuple[VaePlan, ...]:
        """The plans of `job`; to predict their memory takes milliseconds, which a call like the last one saves."""
        whatever_is_free = replace(job, free=None)
        if self._possible is None or self._possible[0] != whatever_is_free:
            self._possible = (whatever_is_free, possible_plans(self.graph, job))
        return make_plans(self.graph, job, self._possible[1])

    def connect(self) -> None:
        """Connect with the other ranks, which do the same, before there is anything to compute.

        Raises:
            VaeFallback: they did not come, or NCCL failed. The next call tries again.
        """
        comm = self._connect(self.graph.conv_in.current().weight.device)
        with comm.alone():
            try:
                self._meet(comm, {"call": "connect"})
                comm.connect()
            except (PeerLost, RankAbsent) as lost:
                comm.close()
                raise VaeFallback(str(lost)) from lost

    @property
    def patience(self) -> float:
        """Seconds to wait for the other ranks to call."""
        return min(self.options.deadline, AFTER_ABSENCE) if self.missed else self.options.deadline

    def weights_changed(self) -> None:
        """In ways that neither addresses nor versions show, as `.data` does: ranks compare them anew."""
        self._digested = [], ""

    def release(self) -> None:
        """Close connections and put weights back as they were found. It can be used again."""
        if self._comm is not None:
            self._comm.close(idle=True)
            self._comm = None
        if self._weights is not None:
            self._weights.restore()
            self._weights = None

    def abandon(self) -> None:
        """Wake this process where it waits for another one, which is gone. Any thread may call it."""
        if self._comm is not None:
            self._comm.abandon()

    def _connect(self, device: torch.device) -> Comm:
        if self._comm is None:
            comm = Comm(self.graph.verb, self.group, self.options.deadline, device)
            check_receivers(self.options.output.ranks, comm.size)
            self._comm = comm
        return self._comm

    # Agreement

    def _agree(
        self, comm: Comm, given: torch.Tensor, tiles: TileSettings | None, lean: bool
    ) -> tuple[VaeJob, list[dict[str, Any]]]:
        """What all ranks call, and the request of each. A rank that cannot take part says so, for all would wait."""
        standing = self._standing(given)
        mine: dict[str, Any] = {}
        own: dict[str, Any] = {"failed": [standing.failed, "done", ""]}
        try:
            mine = self._call_of(comm, given, tiles, lean)
            if not standing.failed:
                own |= self._ability(given, lean, standing)
        except Exception as error:
            verdict = self._verdict_of(comm, error)
            own = {"failed": ["", verdict.kind, verdict.text]}
        requests = self._meet(comm, {**mine, **own})
        comparable = all("call" in request for request in requests)
        if comparable and any({**request, **dict.fromkeys(_OWN)} != mine for request in requests):
            raise _disagreement(self.graph, comm.ranks, requests)
        known, kinds, texts = zip(*(request["failed"] for request in requests))
        if any(known):
            standing.failed = next(filter(None, known))
            raise RanksFailed(standing.failed)
        if any(kind != "done" for kind in kinds):
            verdicts = [Verdict(rank=rank, kind=kind, text=text) for rank, (kind, text) in enumerate(zip(kinds, texts))]
            raise self._failed(comm, verdicts, standing)
        reasons = [request["left"] for request in requests if request["left"] is not None]
        if reasons:
            raise VaeFallback(reasons[0])
        frees = [request["free"] for request in requests if request["free"] is not None]
        job = self._job(
            self._extent(given), comm.size, self._dtype(given).itemsize, min(frees, default=None), tiles, lean
        )
        apart = [request["channels_first"] for request in requests]
        job = replace(
            job,
            strict_cuda=all(request["strict_cuda"] for request in requests),
            by_winograd=any(request["by_winograd"] for request in requests),
            channels_first=None if None in apart else tuple(sorted({name for names in apart for name in names})),
        )
        return job, requests

    def _meet(self, comm: Comm, request: dict[str, Any]) -> list[dict[str, Any]]:
        """A rank that stayed away once may have no call to make, so it is waited for a short time until it comes."""
        try:
            requests = comm.meet(request, self.patience)
        except RankAbsent:
            self.missed = True
            raise
        self.missed = False
        return requests

    def _call_of(self, comm: Comm, given: torch.Tensor, tiles: TileSettings | None, lean: bool) -> dict[str, Any]:
        """What must be the same on all ranks."""
        return {
            "call": self.graph.verb,
            "VAE": self.graph.name,
            "shape": list(given.shape),
            "dtype": str(given.dtype),
            "device": given.device.type,
            "compute": str(self._dtype(given)),
            **_plain_values(replace(self.options, tiles=tiles or self.options.tiles)),
            "lean": lean,
            "weights": self._weights_digest() if comm.size > 1 else None,
            self.graph.source: digest(given) if comm.size > 1 else None,
            **dict.fromkeys(_OWN),
        }

    def _ability(self, given: torch.Tensor, lean: bool, standing: Standing) -> dict[str, Any]:
        """What this rank can do and knows."""
        left = self._why_left(given) or self._why_uncast(given)
        ready = left is None
        if left == NOT_COMPILED and lean and self.options.strict:
            left = None  # plain steps meanwhile: the framework's tiles have other frames than all later calls
        return {
            "free": free_bytes(given.device),
            "strict_cuda": ready and self._strict_cuda(given),
            "channels_first": self._checks.ways.channels_first(tuple(given.shape)),
            "by_winograd": self._by_winograd(given),
            "left": left,
            "compare": standing.calls_left <= 0,
            "compared": sorted(standing.compared),
            "frames": standing.frames,
        }

    def _weights_digest(self) -> str:
        """Of the weights that this rank computes with, read again where they were moved or written to."""
        convs = (conv.current() for conv in self.graph.convs())
        modules = (*convs, *(norm.module for norm in self.graph.norms()))
        tensors = [p for module in modules for p in module.parameters() if not p.is_meta]
        # Nobody counts what is written to an inference tensor.
        places = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in tensors]
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
        raise ModelInvalid(
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

    def _casts(self, given: torch.Tensor) -> bool:
        """Is autocast on, and for another dtype than that of what is given, of a weight or of what a norm returns?"""
        if not torch.is_autocast_enabled(given.device.type):
            return False
        dtype, convs = self._dtype(given), [conv.current() for conv in self.graph.convs()]
        tensors = [given, *(x for conv in convs for x in (conv.weight, conv.bias) if x is not None)]
        return any(x.dtype != dtype for x in tensors) or not keep_dtype(self.graph, dtype)

    def _strict_cuda(self, given: torch.Tensor) -> bool:
        """Can this rank compute strictly in fewer passes? What has to be compared for that is compared here."""
        like = given.new_empty(0, dtype=self.graph.dtype)
        if not self.options.strict or self._casts(given) or not available(like):
            return False
        if "strict_cuda" in self._standing(given).unequal:
            return False
        if not all(conv.current().weight.is_contiguous() for conv in self.graph.convs()):
            return False  # the framework's own sums are channels last then, and a norm of theirs adds in another order
        with torch.no_grad():
            return self._checks.prepare(self.graph, like, self._engines_on(given.device))

    # One attempt

    def _attempt(
        self,
        comm: Comm,
        plan: VaePlan,
        job: VaeJob,
        given: torch.Tensor,
        output: OutputSpec,
        standing: Standing | None,
    ) -> tuple[torch.Tensor | None, list[Verdict]]:
        """Run `plan`; with a `standing` the result is compared with the framework's own, and that is noted there."""
        result: torch.Tensor | None = None
        interrupt: BaseException | None = None
        start = perf_counter()
        try:
            with torch.no_grad():
                result = self._execute(comm, plan, job, given, output)
            equal = standing is None or result is None or self._is_equal(plan, job, given, result, standing, start)
            verdict = Verdict(rank=comm.rank, kind="done" if equal else "unequal")
        except Exception as error:
            verdict = self._verdict_of(comm, error)
        except BaseException as error:  # the peers get an interrupt's verdict too
            verdict = Verdict(rank=comm.rank, kind="stopped", text=type(error).__name__)
            interrupt = error
        if verdict.kind not in ("done", "unequal"):
            comm.close()
            give_back(given.device)
        verdicts = comm.conclude(verdict)
        if interrupt is not None:
            raise interrupt
        if any(each.kind not in ("done", "unequal") for each in verdicts):
            comm.close()
        return result, verdicts

    def _verdict_of(self, comm: Comm, error: Exception) -> Verdict:
        logger.debug("rank %d left its %s", comm.rank, self.graph.verb, exc_info=error)
        traceback.clear_frames(error.__traceback__)  # lets go of every activation the failed attempt holds
        kind = "stopped" if self._delivered else _kind(error)
        return Verdict(rank=comm.rank, kind=kind, text=cause_of(error))

    def _is_equal(
        self, plan: VaePlan, job: VaeJob, given: torch.Tensor, result: torch.Tensor, standing: Standing, start: float
    ) -> bool:
        """Is `result` the framework's own? True, too, where that cannot be computed."""
        assert self.graph.framework is not None
        text: str | None = ""
        try:
            comparison = Comparison(self.graph, self.graph.framework, job, given)
            text = comparison.most_frames(result, standing.frames_of(job), start)
        except Exception as error:  # it must not fail a call that is done
            logger.info("not compared with the framework's own: %s: %s", type(error).__name__, error)
            traceback.clear_frames(error.__traceback__)
            give_back(given.device)
        if text is not None:
            standing.passed(kind_of(plan, job), text, job)
        return text is not None

    def _execute(
        self, comm: Comm, plan: VaePlan, job: VaeJob, given: torch.Tensor, output: OutputSpec
    ) -> torch.Tensor | None:
        mode = MODES[plan.mode]
        if mode.parallel:
            comm.connect()
        sink = self._sink(comm, plan, job, given, output)
        try:
            with self._operators(comm, plan, job, given) as ops:
                run = VaeRun(graph=self.graph, job=job, plan=plan, comm=comm, ops=ops, given=given, sink=sink)
                mode.run(run)
                comm.checkpoint(drain=True)
                return run.close()
        except BaseException:
            sink.cancel()
            raise
        finally:
            self._delivered |= sink.delivered

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

    def _sink(self, comm: Comm, plan: VaePlan, job: VaeJob, given: torch.Tensor, spec: OutputSpec) -> Sink:
        if not MODES[plan.mode].parallel and (spec.ranks is None or comm.rank in spec.ranks):
            spec = replace(spec, ranks=(comm.rank,))  # each receiver computes for itself
        dtype = self.graph.output_dtype or self._dtype(given)
        return Sink(comm, spec, self.graph.output_shape(job.latent), finisher(self.graph), dtype, given.device)

    def _ready(self, given: torch.Tensor) -> FastWeights:
        dtype = self._dtype(given)
        if self._weights is None or self._weights.dtype != dtype:
            self._weights = FastWeights(self.graph, dtype)
        return self._weights

    def _kernels_ahead(self, device: torch.device, dtype: torch.dtype) -> dict[Call, list[Kernel]]:
        """The kernels that calls need, which are compiled from now on. Empty where calls compile them themselves."""
        if device.type != "cuda" or self._learning is None or self.graph.framework is None:
            return {}
        if (device, dtype) not in self._kernels:
            ways, strict = self._ways(device, dtype), self.options.strict
            sizes = [each.name for each in sizes_of(self.graph, dtype)] if strict else []
            launches = needed(self.graph, dtype, strict=strict, ways=ways, sizes=sizes)
            try:
                self._kernels[device, dtype] = COMPILER.start(launches, device, dtype)
            except Exception as error:
                logger.info("kernels are not compiled ahead: %s", cause_of(error))
                self._kernels[device, dtype] = {}
        return self._kernels[device, dtype]

    def _ways(self, device: torch.device, dtype: torch.dtype) -> tuple[tuple[str, ...], ...]:
        """What the convolutions of calls run by: of usual ones where that is known, and of any."""
        if self._engines_on(device) is None:
            return (BY_TORCH,)
        gpu = "sm{}{}".format(*torch.cuda.get_device_capability(device))
        return (by_engines(gpu), BY_ANY) if calls_seen(gpu) and dtype == torch.bfloat16 else (BY_ANY,)

    def _engines_on(self, device: torch.device) -> Engines | None:
        if device not in self._engines:
            wanted = self.options.engines
            try:
                self._engines[device] = engines_on(device, self._learning, self.graph.dtype) if wanted else None
            except Exception as error:
                logger.warning("cuDNN's engines are not used: %s", cause_of(error))
                self._engines[device] = None
        return self._engines[device]


def _kind(error: BaseException) -> str:
    if isinstance(error, PeerLost):
        return "peer"
    return "oom" if is_memory(error) else "error"


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


def _disagreement(graph: Graph, ranks: list[int], requests: list[dict[str, Any]]) -> RankDisagreement:
    """Each rank's value of what is not the same everywhere; the input's digest only where nothing else differs."""
    first = requests[0]
    keys = [key for key in first if key not in _OWN and any(each.get(key) != first.get(key) for each in requests)]
    if len(keys) > 1 and graph.source in keys:
        keys.remove(graph.source)
    rows = [
        f"rank {rank}: {', '.join(f'{key} {each.get(key)}' for key in keys)}" for rank, each in zip(ranks, requests)
    ]
    error = RankDisagreement(
        f"the {len(ranks)} ranks of this {graph.verb} came with different requests: {'; '.join(rows)}",
        expected=f"the same {graph.source}, weights and options on every rank",
        hint=f"Give every rank the same {graph.source} and settings, and make the same calls on every rank",
    )
    error.differing = tuple(keys)
    return error


def _failure(graph: Graph, plan: VaePlan | None, ranks: list[int], verdicts: Sequence[Verdict]) -> RanksFailed:
    failed = sum(verdict.kind in _NAMES for verdict in verdicts)
    memory = any(verdict.kind == "oom" for verdict in verdicts)
    call = graph.verb if plan is None else f"{plan.mode} {graph.verb}"
    return RanksFailed(
        f"{call} on {len(ranks)} ranks failed on {failed}: {_failures(ranks, verdicts)}",
        hint="Use mode='auto', more ranks or uint8 output on one rank" if memory else None,
    )


def _failures(ranks: list[int], verdicts: Sequence[Verdict]) -> str:
    """What each rank that failed says; one whose result was not equal did not fail."""
    bad = [verdict for verdict in verdicts if verdict.kind in _NAMES]
    return "; ".join(f"rank {ranks[v.rank]}: {_NAMES[v.kind]}{': ' + v.text if v.text else ''}" for v in bad)


_NAMES = {"oom": "out of memory", "error": "failed", "stopped": "failed", "peer": "lost its peer", "lost": "gone"}
