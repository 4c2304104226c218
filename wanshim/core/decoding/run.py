"""Runs a call that all ranks agreed on, by the first plan for which memory suffices.

Each attempt ends with the verdicts of all ranks, so every rank gets the same answer or raises the same error.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import torch

from wanshim.core.decoding.model.framework import VaeFallback
from wanshim.core.decoding.model.graph import Graph
from wanshim.core.decoding.modes import MODES, SINGLE
from wanshim.core.decoding.modes.network import VaeRun, finisher
from wanshim.core.decoding.operators.base import FastOperators, Operators, StrictOperators
from wanshim.core.decoding.operators.engines import Engines, engines_on
from wanshim.core.decoding.operators.strict_checks import Checks
from wanshim.core.decoding.operators.strict_cuda import StrictCudaOperators
from wanshim.core.decoding.operators.strict_kernels import available
from wanshim.core.decoding.operators.weights import FastWeights
from wanshim.core.decoding.ranks.exchange import Comm, PeerLost, Verdict
from wanshim.core.decoding.ranks.output import OutputSpec, Sink
from wanshim.core.shared.fallback import cause_of
from wanshim.core.shared.gpu_memory import give_back, is_memory, release_cached
from wanshim.core.shared.kernel_compiler import COMPILER, Kernel, missing
from wanshim.core.shared.optional_triton import triton
from wanshim.core.shared.recent import Recent
from wanshim.errors import RanksFailed

from .dry_run import dry_run, usual_shapes
from .plan import CallFacts, VaeJob, VaePlan
from .proof import CompareState, Comparison

logger = logging.getLogger("wanshim.decoding")
_NAMES = {"oom": "out of memory", "error": "failed", "stopped": "failed", "peer": "lost its peer", "lost": "gone"}


class VaeOperators:
    """The means to compute one VAE in this process: engines, kernels and weights, and what was compared for them.

    Args:
        strict, engines: see `VaeOptions`.
        learning: see `ParallelVae`.
    """

    def __init__(self, graph: Graph, strict: bool, engines: bool, learning: float | None) -> None:
        self.graph = graph
        self.strict = strict
        self.checks = Checks() if graph.framework is None else Checks(graph.framework.is_replaced)
        self.weights: FastWeights | None = None
        self._wants_engines, self._learning = engines, learning
        self._engines: dict[torch.device, Engines | None] = {}
        self._kernels: Recent[tuple[Any, ...], list[Kernel]] = Recent(256)  # of calls
        self._takes_kernels: dict[tuple[torch.device, torch.dtype], bool] = {}
        device = graph.conv_in.current().weight.device
        self.engines_on(device)  # loads cuDNN's frontend now, and not in the first call
        if self._compiles_ahead(device):
            by = self._convolves_by(device, graph.dtype)
            self._compile_next(product((by, "either") if by == "engines" else (by,), usual_shapes(graph)), device)

    @contextlib.contextmanager
    def of(
        self, comm: Comm, plan: VaePlan, job: VaeJob, given: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[Operators]:
        """The operators of `plan`, which compute in `dtype`."""
        if plan.strict and not job.strict_cuda:
            yield StrictOperators(plan.dim)
            return
        settle = partial(comm.checkpoint, drain=True)  # a host that waits for the GPU waits for a peer's message too
        if plan.strict:
            self.checks.ways.settle = settle
            yield StrictCudaOperators(self.checks, plan.dim)
            self.checks.ways.finished(tuple(given.shape))
            return
        engines = self.engines_on(given.device)
        if engines is not None:
            engines.settle = settle
        if self.weights is None or self.weights.dtype != dtype:
            self.weights = FastWeights(self.graph, dtype)
        with self.weights as weights, torch.autocast(given.device.type, enabled=False):
            if engines is None:
                yield FastOperators(weights, plan.dim)
            else:
                yield FastOperators(weights, plan.dim, engines, engines.by_winograd if plan.by_winograd else None)

    def fused(self, given: torch.Tensor) -> bool:
        """Whether this rank can compute strictly in fewer passes. What has to be compared for that is compared here."""
        like = given.new_empty(0, dtype=self.graph.dtype)
        key = like.device, like.dtype
        if key not in self._takes_kernels:
            self._takes_kernels[key] = available(like)
        if not self._takes_kernels[key]:
            return False
        if not all(conv.current().weight.is_contiguous() for conv in self.graph.convs() if conv.resolve is not None):
            return False
        with torch.no_grad():
            return self.checks.prepare(self.graph, like, self.engines_on(given.device))

    def by_winograd(self, device: torch.device, dtype: torch.dtype) -> bool:
        return not self.strict and dtype.itemsize == 2 and self.engines_on(device) is not None

    def kernels_of(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> list[Kernel]:
        """The kernels that a call with an input of this shape launches on one GPU, which are compiled from now on.
        Empty where calls compile them themselves."""
        if not self._compiles_ahead(device):
            return []
        key = (tuple(shape), device, dtype)
        if key not in self._kernels:
            try:
                self._kernels[key] = self._compile(
                    shape, device, dtype, self._convolves_by(device, dtype), awaited=True
                )
            except Exception as error:
                logger.debug("kernels are not compiled ahead: %s", cause_of(error))
                self._kernels[key] = []
        return self._kernels[key]

    def are_compiling(self, given: torch.Tensor, dtype: torch.dtype, seconds: float) -> bool:
        """Whether kernels that a call launches are still being compiled.

        Args:
            seconds: to wait at most: other ranks wait for this one meanwhile.
        """
        kernels = self.kernels_of(given.shape, given.device, dtype)
        return bool(kernels) and missing(kernels, seconds)

    def _compiles_ahead(self, device: torch.device) -> bool:
        """Whether calls have their kernels compiled before: only where a framework can compute meanwhile."""
        known = triton is not None and self.graph.framework is not None
        return known and device.type == "cuda" and self._learning is not None

    def _convolves_by(self, device: torch.device, dtype: torch.dtype) -> str:
        """The way of most convolutions of a call, as `dry_run` names it."""
        return "engines" if self.engines_on(device) is not None and (self.strict or dtype.itemsize == 2) else "torch"

    def _compile(
        self, shape: Sequence[int], device: torch.device, dtype: torch.dtype, by: str, *, awaited: bool
    ) -> list[Kernel]:
        return COMPILER.start(dry_run(self.graph, shape, dtype, strict=self.strict, by=by), device, awaited=awaited)

    def _compile_next(self, calls: Iterator[tuple[str, Sequence[int]]], device: torch.device) -> None:
        """Have the kernels of the next of these calls compiled, then those of the one behind it: a dry run holds the
        interpreter, so one at a time."""

        def compile_one(by: str, shape: Sequence[int]) -> None:
            try:
                self._compile(shape, device, self.graph.dtype, by, awaited=False)
            finally:
                self._compile_next(calls, device)

        if (following := next(calls, None)) is not None:
            COMPILER.do(partial(compile_one, *following))

    def wait_for_kernels(self, shape: Sequence[int] | None) -> None:
        """Wait for those of a call with an input of this shape; None: for all that are being compiled."""
        if shape is None:
            COMPILER.wait()
            return
        for kernel in self.kernels_of(shape, self.graph.conv_in.current().weight.device, self.graph.dtype):
            kernel.done.wait()

    def release(self) -> None:
        """Put weights back as they were found."""
        if self.weights is not None:
            self.weights.restore()
            self.weights = None

    def engines_on(self, device: torch.device) -> Engines | None:
        if device not in self._engines:
            wanted = self._wants_engines
            try:
                self._engines[device] = engines_on(device, self._learning, self.graph.dtype) if wanted else None
            except Exception as error:
                logger.warning("cuDNN's engines are not used: %s", cause_of(error))
                self._engines[device] = None
        return self._engines[device]


class CallRun:
    """One call that all ranks agreed on.

    Args:
        given: the whole input, on every rank.
        state: what is known of calls of this size.
        on_plan: is called with the plan that is tried, and again once more is known of it.
    """

    def __init__(
        self,
        operators: VaeOperators,
        comm: Comm,
        job: VaeJob,
        given: torch.Tensor,
        output: OutputSpec,
        state: CompareState,
        on_plan: Callable[[VaePlan], None],
    ) -> None:
        self.operators, self.comm, self.job, self.given = operators, comm, job, given
        self.graph, self.output, self.state = operators.graph, output, state
        self._on_plan = on_plan
        self._delivered = False  # a callback has frames

    def run(self, plans: Sequence[VaePlan], facts: Sequence[CallFacts]) -> torch.Tensor | None:
        """Try `plans` in their order; the result on a rank that gets it.

        Args:
            facts: of each rank.
        """
        self.state.frames = max(each.frames for each in facts)  # a rank's weights may be laid otherwise
        for attempt, plan in enumerate(plans):
            if attempt:
                self.comm.next_attempt()
                logger.warning("out of memory; all ranks go on with the next plan:\n%s", plan)
            elif self.job.is_tight(plan):
                release_cached(self.given.device)
            kind = plan.kind(self.job)
            compares = self._has_own_result(plan) and any(each.compare or kind not in each.compared for each in facts)
            whole = compares and self._keeps_frames(plan)
            self._on_plan(replace(plan, compared=self.state.compared.get(kind, "")))
            if compares and not whole and not self._rehearse(plan):
                raise self._unequal()
            result, verdicts = self._attempt(plan, compares=whole)
            self._on_plan(replace(plan, compared=self.state.compared.get(kind, "")))
            kinds = {verdict.kind for verdict in verdicts}
            if kinds == {"done"}:
                self.state.calls_left -= 1
                return result
            if kinds <= {"done", "unequal"}:
                raise self._unequal()
            if not kinds <= {"oom", "peer", "done"} or "oom" not in kinds or attempt + 1 == len(plans):
                raise self._failed(plan, verdicts)
        raise AssertionError("make_plans returns at least one plan")

    def _failed(self, plan: VaePlan, verdicts: Sequence[Verdict]) -> RanksFailed:
        error = failure(self.graph, self.comm.ranks, verdicts, self.state, plan)
        error.left_to_framework = not self._delivered
        return error

    def _unequal(self) -> VaeFallback:
        """These operators are off for calls like this one; the next call tries the plainer ones, if there are any."""
        self.state.unequal.add(self.job.passes)
        self.state.compared.clear()
        return VaeFallback(not_equal(self.graph, self.given, self.state.dtype))

    def _has_own_result(self, plan: VaePlan) -> bool:
        """Whether `plan` promises the bits of a framework whose own result is available."""
        return plan.exactness == "strict" and self.graph.framework is not None and self.graph.framework.known

    def _keeps_frames(self, plan: VaePlan) -> bool:
        """Whether each rank holds a result that can be compared, of work with the other ranks too."""
        whole = not MODES[plan.mode].parallel or self.state.frames_of(self.job) == self.job.latent[2]
        return whole and self.output == OutputSpec()

    def _rehearse(self, plan: VaePlan) -> bool:
        """Make a short call of the same kind and compare it; is it equal on all ranks, or could nothing be compared?"""
        b, c, _, h, w = self.job.latent
        frames, dtype = self.state.frames_of(self.job), self.state.dtype
        job = replace(self.job, latent=(b, c, frames, h, w), output_itemsize=dtype.itemsize)
        short_plan = (MODES[plan.mode].plan(self.graph, job) or SINGLE.plan(self.graph, job))[-1]
        first, own = self.graph.cut(self.given, 2, 0, frames), CompareState(dtype=dtype, frames=frames)
        short = CallRun(self.operators, self.comm, job, first, OutputSpec(), own, self._on_plan)
        _, verdicts = short._attempt(short_plan, compares=True)
        self.comm.next_attempt()
        kinds = {verdict.kind for verdict in verdicts}
        if kinds <= {"done", "unequal"}:
            found = next(iter(own.compared.values()), "")
            text = f"the first {frames} of {self.job.latent[2]} latent frames" if found else ""
            self.state.passed(plan.kind(self.job), text, self.job)
        elif not kinds <= {"done", "unequal", "oom", "peer"}:
            raise self._failed(plan, verdicts)
        elif "unequal" not in kinds:  # it must not fail the call; the next one tries again
            logger.info("not compared with the framework's own: %s", _failures(self.comm.ranks, verdicts))
        return "unequal" not in kinds

    def _attempt(self, plan: VaePlan, *, compares: bool) -> tuple[torch.Tensor | None, list[Verdict]]:
        """Run `plan`, if it `compares` beside the framework's own, and exchange verdicts."""
        result: torch.Tensor | None = None
        interrupt: BaseException | None = None
        comm, start = self.comm, perf_counter()
        try:
            with torch.no_grad():
                result = self._execute(plan)
            equal = not compares or result is None or self._is_equal(plan, result, start)
            verdict = Verdict(rank=comm.rank, kind="done" if equal else "unequal")
        except Exception as error:
            verdict = verdict_of(comm, error, delivered=self._delivered)
        except BaseException as error:  # the peers get an interrupt's verdict too
            verdict = Verdict(rank=comm.rank, kind="stopped", text=type(error).__name__)
            interrupt = error
        if verdict.kind not in ("done", "unequal"):
            comm.close()
            give_back(self.given.device)
        verdicts = comm.conclude(verdict)
        if interrupt is not None:
            raise interrupt
        if any(each.kind not in ("done", "unequal") for each in verdicts):
            comm.close()
        return result, verdicts

    def _is_equal(self, plan: VaePlan, result: torch.Tensor, start: float) -> bool:
        """Whether `result` is the framework's own. True, too, where that cannot be computed."""
        assert self.graph.framework is not None
        text: str | None = ""
        try:
            comparison = Comparison(self.graph, self.graph.framework, self.job, self.given)
            text = comparison.most_frames(result, self.state.frames_of(self.job), start)
        except Exception as error:  # it must not fail a call that is done
            logger.info("not compared with the framework's own: %s: %s", type(error).__name__, error)
            traceback.clear_frames(error.__traceback__)
            give_back(self.given.device)
        if text is not None:
            self.state.passed(plan.kind(self.job), text, self.job)
        return text is not None

    def _execute(self, plan: VaePlan) -> torch.Tensor | None:
        mode, comm, job, given, spec = MODES[plan.mode], self.comm, self.job, self.given, self.output
        if mode.parallel:
            comm.connect()
        elif spec.ranks is None or comm.rank in spec.ranks:
            spec = replace(spec, ranks=(comm.rank,))  # each receiver computes for itself
        dtype = self.graph.output_dtype or self.state.dtype
        sink = Sink(comm, spec, self.graph.output_shape(job.latent), finisher(self.graph), dtype, given.device)
        try:
            with self.operators.of(comm, plan, job, given, self.state.dtype) as ops:
                run = VaeRun(graph=self.graph, job=job, plan=plan, comm=comm, ops=ops, given=given, sink=sink)
                mode.run(run)
                comm.checkpoint(drain=True)
                return run.close()
        except BaseException:
            sink.cancel()
            raise
        finally:
            self._delivered |= sink.delivered


def verdict_of(comm: Comm, error: Exception, *, delivered: bool = False) -> Verdict:
    """The verdict of this rank, which an error has stopped.

    Args:
        delivered: a callback has frames of this call already.
    """
    logger.debug("rank %d left its %s", comm.rank, comm.verb, exc_info=error)
    traceback.clear_frames(error.__traceback__)  # lets go of every activation the failed attempt holds
    kind = "peer" if isinstance(error, PeerLost) else "oom" if is_memory(error) else "error"
    return Verdict(rank=comm.rank, kind="stopped" if delivered else kind, text=cause_of(error))


def failure(
    graph: Graph, ranks: Sequence[int], verdicts: Sequence[Verdict], state: CompareState, plan: VaePlan | None = None
) -> RanksFailed:
    """The error that all ranks raise. The next call like this one fails at once if the cause stays: it was neither
    memory, nor a rank that is gone, nor the user's interrupt or callback."""
    failed = sum(verdict.kind in _NAMES for verdict in verdicts)
    memory = any(verdict.kind == "oom" for verdict in verdicts)
    call = graph.verb if plan is None else f"{plan.mode} {graph.verb}"
    error = RanksFailed(
        f"{call} on {len(ranks)} ranks failed on {failed}: {_failures(ranks, verdicts)}",
        hint="Use mode='auto', more ranks or uint8 output on one rank" if memory else None,
    )
    if any(verdict.kind == "error" for verdict in verdicts):
        state.failed = error.found
    return error


def _failures(ranks: Sequence[int], verdicts: Sequence[Verdict]) -> str:
    """The texts of the ranks that failed; one whose result was not equal did not fail."""
    bad = [verdict for verdict in verdicts if verdict.kind in _NAMES]
    return "; ".join(f"rank {ranks[v.rank]}: {_NAMES[v.kind]}{': ' + v.text if v.text else ''}" for v in bad)


def not_equal(graph: Graph, given: torch.Tensor, dtype: torch.dtype) -> str:
    """Why the framework computes calls like this one."""
    call = f"a {graph.source} of {list(given.shape)} in {str(dtype).removeprefix('torch.')}"
    return f"strict was not equal for {call}: the framework's own"
