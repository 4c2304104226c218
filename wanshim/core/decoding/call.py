"""A call of a VAE: its facts are made where it enters, all ranks agree on them, and then it is planned and run."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from wanshim.core.decoding.model.binding import Compute
from wanshim.core.decoding.model.framework import VaeFallback
from wanshim.core.decoding.model.graph import Graph
from wanshim.core.decoding.operators.base import conv_flags
from wanshim.core.decoding.operators.learning import SHARE
from wanshim.core.decoding.operators.strict_checks import keep_dtype
from wanshim.core.decoding.ranks.exchange import Comm, PeerLost, Verdict
from wanshim.core.decoding.ranks.output import OutputSpec, check_receivers
from wanshim.core.shared.digest import digest, digest_weights
from wanshim.core.shared.fallback import framework_computes, or_framework
from wanshim.core.shared.gpu_memory import free_bytes
from wanshim.core.shared.kernel_compiler import COMPILER, Kernel
from wanshim.core.shared.plain import seen_by, traced_by
from wanshim.core.shared.recent import Recent
from wanshim.errors import ModelInvalid, RankAbsent, RankDisagreement, RanksFailed
from wanshim.values import checked_seconds

from .plan import CallFacts, TileSettings, VaeJob, VaePlan
from .planner import make_plans, possible_plans
from .proof import CompareState
from .run import CallRun, VaeOperators, failure, not_equal, verdict_of

logger = logging.getLogger("wanshim.decoding")
NOT_COMPILED = "its kernels are being compiled beside it, once on this machine; later calls take them"
AFTER_ABSENCE = 5.0  # seconds
_LARGE = (9, 128, 128)  # latent frames, height and width, for which every mode has a plan


class KernelsMissing(VaeFallback):
    """A call of one process stays with the framework while its kernels are compiled."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        super().__init__(NOT_COMPILED)
        self._kernels = kernels

    def wait(self) -> None:
        """Wait until they are there, or could not be compiled."""
        for kernel in self._kernels:
            kernel.done.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeOptions:
    """The choices of a caller; see `parallelize_decode` for those not named here.

    Args:
        mode: auto, temporal, spatial or, of a decode, tile.
        strict: the framework's own bits where the mode allows it, which is compared (`proof.py`).
        active: how many ranks of the group compute, the first ones; None: all. The others only receive.
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
        self.group = group
        self.options = options if options is not None else VaeOptions()
        self.operators = VaeOperators(graph, self.options.strict, self.options.engines, learning)
        self.plan: VaePlan | None = None
        self.missed = False  # a rank did not come to the last call
        self._comm: Comm | None = None
        # Place and version of each weight, and the digest of all.
        self._digested: tuple[list[tuple[int, int]], str] = [], ""
        self._asked = _plain_values(graph, self.options)
        self._states: Recent[tuple[Any, ...], CompareState] = Recent(256)
        self._last: tuple[tuple[Any, ...], CompareState] | None = None  # of the last call
        self._planned: tuple[VaeJob, list[VaePlan], tuple[VaePlan, ...]] | None = None
        self._said_tiles = False

    def __call__(self, given: torch.Tensor, *, tiles: TileSettings | None = None, lean: bool = False) -> torch.Tensor:
        """Decode a latent, or encode a video.

        Returns:
            Of a latent [B, Z, t, h, w] frames [B, C, T, H, W] in -1..1 (or uint8); of a video [B, C, T, H, W] the mean
            and the logarithm of the variance [B, 2 Z, t, h, w]. Without elements on a rank that keeps no output: it is
            not among the output's ranks, or a callback took the frames.

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
        comm, engines = self._connect(given.device), self.operators.engines_on(given.device)
        # Kernels and events are of the current device, which in a thread, or behind .to("cuda:1"), is another one.
        on_device = torch.cuda.device_of(given)
        with comm.alone(), on_device, contextlib.nullcontext() if engines is None else engines.call():
            comm.move_to(given.device)
            state = self._state(given)
            facts = self._meet(comm, self._facts(comm, given, state, tiles, lean))
            job = self._agree(comm, given, state, facts, tiles, lean)
            with COMPILER.paused() if COMPILER.started else contextlib.nullcontext():
                run = CallRun(self.operators, comm, job, given, self.options.output, state, self._show)
                output = run.run(self._plans(job), facts)
        return given.new_empty(0) if output is None else output

    def in_place_of(
        self,
        original: Callable[..., Any],
        compute: Compute,
        target: Any,
        on_fallback: Callable[[str], None],
        strict: Callable[[], bool],
    ) -> Callable[..., Any]:
        """The method that all ranks share; `original`, with the output that was asked for, in each call that the
        framework must compute itself.

        Args:
            original: a method of `target`.
            on_fallback, strict: see `or_framework`.
        """

        def shared(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = input_first(original, args, kwargs)
            self.refuse_traced(*args)
            return compute(self, target, *args, **kwargs)

        def own(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if framework_computes():
                return result
            try:
                self.refuse_traced(*input_first(original, args, kwargs)[0])
            except VaeFallback:  # more is wanted than values, and a change of the frames would lose that
                return result
            return with_frames(result, self._as_asked)

        return or_framework(shared, own, on_fallback, strict=strict)

    def untried(self) -> VaePlan:
        """The plan before the first call: the modes that may be taken. Its size decides among them."""
        together = dist.is_available() and dist.is_initialized()
        ranks = max(1, dist.get_world_size(self.group)) if together else 1
        extent = (1, self.graph.input_channels, *_LARGE)
        plans = possible_plans(self.graph, self._job(extent, ranks, self.graph.dtype))
        return replace(
            min(plans, key=lambda plan: plan.cost),
            mode=self.options.mode,
            axis=None,
            tries=tuple(dict.fromkeys(plan.mode for plan in plans)),
            reason=f"the fastest that fits in memory at the size of the first {self.graph.verb}",
        )

    def refuse_traced(self, *given: Any) -> None:
        """Raise VaeFallback where more is wanted than values: gradients of the input or of the weights, for which a
        call keeps no graph, or what `traced_by` or a tensor of another class, such as a fake one, makes of a step; and
        where the input, the first of what is given, is no tensor, of which the framework says what it wants."""
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise VaeFallback(f"the {self.graph.source} wants gradients")
        if (traced := traced_by()) is not None:
            raise VaeFallback(f"the {self.graph.verb} is called inside {traced}")
        strange = [type(x) for x in (*given[:1], *tensors) if type(x) not in (torch.Tensor, torch.nn.Parameter)]
        if strange:
            raise VaeFallback(f"the {self.graph.source} is a {strange[0].__module__}.{strange[0].__qualname__}")
        if self.graph.framework is not None and self.graph.framework.trains():
            raise VaeFallback(
                "weights of the VAE want gradients: call it under torch.no_grad() if they are not trained"
            )

    def _as_asked(self, frames: torch.Tensor) -> torch.Tensor:
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

    def connect(self) -> None:
        """Connect with the other ranks, which do the same, before there is anything to compute.

        Raises:
            VaeFallback: they did not come, or NCCL failed. The next call tries again.
        """
        comm = self._connect(self.graph.conv_in.current().weight.device)
        with comm.alone():
            try:
                self._meet(comm, CallFacts(asked={"call": "connect"}))
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
        self.operators.release()

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

    def _meet(self, comm: Comm, mine: CallFacts) -> list[CallFacts]:
        """The facts of each rank. A rank that stayed away once may have no call to make, so it is waited for a short
        time until it comes."""
        try:
            facts = [CallFacts(**each) for each in comm.meet(mine.to_json(), self.patience)]
        except RankAbsent:
            self.missed = True
            raise
        self.missed = False
        return facts

    # The facts of a call

    def _state(self, given: torch.Tensor) -> CompareState:
        """The state of calls like this one."""
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # the older switch may not be readable
        flags = (*conv_flags(), *(each.fp32_precision for each in backends))
        kind = given.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else self.graph.dtype
        laid = all(conv.module.weight.is_contiguous() for conv in self.graph.convs())
        key = (given.shape, given.dtype, given.device, dtype, *given.stride(), *flags, autocast, laid)
        if self._last is None or self._last[0] != key:
            if key not in self._states:
                # Values or weights laid channels last take the framework through other kernels, some in later frames
                # alone.
                plain = given.is_contiguous() or not given.is_contiguous(memory_format=torch.channels_last_3d)
                state = CompareState(dtype=dtype, laid=laid)
                state.frames = state.frames if plain and laid else given.shape[2]
                self._states[key] = state
            self._last = key, self._states[key]
        return self._last[1]

    def _facts(
        self, comm: Comm, given: torch.Tensor, state: CompareState, tiles: TileSettings | None, lean: bool
    ) -> CallFacts:
        """A rank that cannot take part says so, for all would wait."""
        asked: dict[str, Any] = {}
        try:
            if (seen := seen_by()) is not None:  # said to all ranks: a mode that counts operations may be on on one
                raise VaeFallback(f"{seen} is on, which would not see how the {self.graph.verb} is computed")
            asked = self._asked | {
                "shape": list(given.shape),
                "dtype": str(given.dtype),
                "device": given.device.type,
                "compute": str(state.dtype),
                "lean": lean,
                "weights": self._weights_digest() if comm.size > 1 else None,
                self.graph.source: digest(given) if comm.size > 1 else None,
            }
            if tiles is not None:
                asked["tiles"] = str(tiles)
            if state.failed:
                return CallFacts(asked=asked, failed=state.failed)
            casts = self.options.strict and self._casts(given, state.dtype)
            left = self._why_left(given, state, casts)
            fused = self.options.strict and state.laid and not casts and "strict_cuda" not in state.unequal
            fused = fused and left is None and self.operators.fused(given)
            if left == NOT_COMPILED and lean and self.options.strict:
                left = None  # plain steps meanwhile: the framework's tiles have other frames than all later calls
            return CallFacts(
                asked=asked,
                left=left,
                free=free_bytes(given.device) if given.is_cuda else None,
                strict_cuda=fused,
                channels_first=self.operators.checks.ways.channels_first(tuple(given.shape)) if fused else None,
                by_winograd=self.operators.by_winograd(given.device, state.dtype),
                compare=state.calls_left <= 0,
                compared=sorted(state.compared),
                frames=state.frames,
            )
        except VaeFallback as reason:
            return CallFacts(asked=asked, left=str(reason))
        except Exception as error:
            verdict = verdict_of(comm, error)
            return CallFacts(asked=asked, error=(verdict.kind, verdict.text))

    def _why_left(self, given: torch.Tensor, state: CompareState, casts: bool) -> str | None:
        """Why the framework must compute this itself, on every rank.

        Args:
            casts: autocast casts what strict computes.
        """
        if self.options.strict and "strict" in state.unequal:
            return not_equal(self.graph, given, state.dtype)
        if self.graph.framework is not None:
            if (reason := self.graph.framework.why_not_plain()) is not None:
                return reason
            # Where autocast casts, strict takes the framework's own steps, without kernels.
            if not casts and self.operators.are_compiling(given, state.dtype, self.options.deadline / 2):
                return NOT_COMPILED
        if given.dtype == state.dtype or torch.is_autocast_enabled(given.device.type):
            return None
        # The framework may refuse it by an error of its own: the graph casts none.
        return f"a {self.graph.source} in {given.dtype}, and weights in {self.graph.dtype}"

    def _weights_digest(self) -> str:
        """The digest of this rank's weights, read again where they were moved or written to.

        Raises:
            VaeFallback: what a weight holds is not all that it is, as of one that ranks have shares of.
        """
        convs = (conv.current() for conv in self.graph.convs())
        modules = (*convs, *(norm.module for norm in self.graph.norms()))
        tensors = [p for module in modules for p in module.parameters() if not p.is_meta]
        if other := next((type(each) for each in tensors if type(each) is not torch.nn.Parameter), None):
            raise VaeFallback(f"weights of the VAE are of {other.__module__}.{other.__qualname__}")
        # Nobody counts what is written to an inference tensor.
        places = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in tensors]
        if places != self._digested[0]:
            text = json.dumps(digest_weights(tensors))
            self._digested = places, hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._digested[1]

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

    def _casts(self, given: torch.Tensor, dtype: torch.dtype) -> bool:
        """Is autocast on, and for another dtype than that of what is given, of a weight or of what a norm returns?"""
        if not torch.is_autocast_enabled(given.device.type):
            return False
        convs = [conv.current() for conv in self.graph.convs()]
        tensors = [given, *(x for conv in convs for x in (conv.weight, conv.bias) if x is not None)]
        return any(x.dtype != dtype for x in tensors) or not keep_dtype(self.graph, dtype)

    # Agreement and plan

    def _agree(
        self,
        comm: Comm,
        given: torch.Tensor,
        state: CompareState,
        facts: Sequence[CallFacts],
        tiles: TileSettings | None,
        lean: bool,
    ) -> VaeJob:
        """The job that the facts of all ranks come to, or the error that all raise."""
        if all(each.asked for each in facts) and any(each.asked != facts[0].asked for each in facts):
            raise _disagreement(self.graph, comm.ranks, [each.asked for each in facts])
        if any(each.failed for each in facts):
            state.failed = next(each.failed for each in facts if each.failed)
            raise RanksFailed(state.failed)
        if any(each.error for each in facts):
            ends = (each.error or ("done", "") for each in facts)
            verdicts = [Verdict(rank=rank, kind=kind, text=text) for rank, (kind, text) in enumerate(ends)]
            raise failure(self.graph, comm.ranks, verdicts, state)
        reasons = [each.left for each in facts if each.left is not None]
        if reasons == [NOT_COMPILED] and comm.size == 1:
            raise KernelsMissing(self.operators.kernels_of(given.shape, given.device, state.dtype))
        if reasons:
            raise VaeFallback(reasons[0])
        apart = [each.channels_first for each in facts]
        return self._job(
            self._extent(given),
            comm.size,
            state.dtype,
            tiles,
            lean,
            free=min((each.free for each in facts if each.free is not None), default=None),
            strict_cuda=all(each.strict_cuda for each in facts),
            by_winograd=any(each.by_winograd for each in facts),
            channels_first=None if None in apart else tuple(sorted({name for names in apart for name in names or ()})),
        )

    def _job(
        self,
        extent: tuple[int, int, int, int, int],
        ranks: int,
        dtype: torch.dtype,
        tiles: TileSettings | None = None,
        lean: bool = False,
        **agreed: Any,
    ) -> VaeJob:
        options, output = self.options, self.options.output
        out = 1 if output.uint8 else (self.graph.output_dtype or dtype).itemsize
        return VaeJob(
            latent=extent,
            itemsize=dtype.itemsize,
            ranks=ranks,
            active=options.active,
            strict=options.strict,
            mode=options.mode,
            axis=options.axis,
            chunk=options.chunk,
            lean=lean,
            output_itemsize=0 if output.on_chunk is not None else out,
            tiles=tiles if tiles is not None else options.tiles,
            **agreed,
        )

    def _plans(self, job: VaeJob) -> tuple[VaePlan, ...]:
        """The plans of `job`; to predict their memory takes milliseconds, which a call like the last one saves."""
        known = self._planned
        if known is None or known[0] != job:
            alike = known is not None and replace(known[0], free=job.free) == job
            possible = known[1] if known is not None and alike else possible_plans(self.graph, job)
            self._planned = known = job, possible, make_plans(self.graph, job, possible)
        return known[2]

    def _show(self, plan: VaePlan) -> None:
        self.plan = plan
        if plan.without_tiles and not self._said_tiles:
            self._said_tiles = True
            logger.warning("tiling was asked for, and is replaced by:\n%s", plan)


def input_first(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `method`, a bound one, with the latent or video by position: each framework has a name
    of its own for it, and a `Compute` another."""
    name = None if args else next(iter(inspect.signature(method).parameters), None)
    if name not in kwargs:
        return args, kwargs
    return (kwargs[name],), {other: value for other, value in kwargs.items() if other != name}


def with_frames(result: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The result of a decode method, with its frames changed.

    Args:
        result: a tensor, a tuple that begins with one, or an output of diffusers with the tensor in `sample`; anything
            else is returned as it is.
    """
    if isinstance(result, torch.Tensor):
        return change(result)
    if isinstance(result, tuple) and result and isinstance(result[0], torch.Tensor):
        return (change(result[0]), *result[1:])
    frames = getattr(result, "sample", None)
    return type(result)(sample=change(frames)) if isinstance(frames, torch.Tensor) else result


def _plain_values(graph: Graph, options: VaeOptions) -> dict[str, Any]:
    """The VAE and the options as plain values. Whether frames are uint8 or go to a callback may differ from rank to
    rank."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    ranks = options.output.ranks
    values["tiles"] = str(options.tiles)
    values["output"] = "all ranks" if ranks is None else f"ranks {', '.join(map(str, ranks))}"
    return {"call": graph.verb, "VAE": graph.name, **values}


def _disagreement(graph: Graph, ranks: list[int], asked: list[dict[str, Any]]) -> RankDisagreement:
    """Each rank's value of what is not the same everywhere; the input's digest only where nothing else differs."""
    first = asked[0]
    keys = [key for key in first if any(each.get(key) != first.get(key) for each in asked)]
    if len(keys) > 1 and graph.source in keys:
        keys.remove(graph.source)
    rows = [f"rank {rank}: {', '.join(f'{key} {each.get(key)}' for key in keys)}" for rank, each in zip(ranks, asked)]
    error = RankDisagreement(
        f"the {len(ranks)} ranks of this {graph.verb} came with different requests: {'; '.join(rows)}",
        expected=f"the same {graph.source}, weights and options on every rank",
        hint=f"Give every rank the same {graph.source} and settings, and make the same calls on every rank",
    )
    error.differing = tuple(keys)
    return error
