"""Chooses how a decode or encode runs. Pure: from the shape, ranks and memory free on the fullest rank to a plan.

Every rank calls this with the same agreed facts and gets the same list: the plan to run first, then the cheaper ones
to fall back to together when memory runs out. The modes propose (`modes/`), this chooses.
"""

from __future__ import annotations

from dataclasses import replace

from wanshim.core.decoding.model.graph import EncoderGraph, Graph
from wanshim.core.decoding.modes import MODES, SINGLE, Mode
from wanshim.errors import ModelInvalid

from .plan import VaeJob, VaePlan

_USABLE = 0.92  # of the free memory, by a plan: the allocator fragments
# A plan that takes more may run out in the second call, among the fragments of the first; 0.87 and 0.90 did, on an H200
# held to 12 and 24 GiB. One as fast that takes less is preferred.
_ROOMY = 0.85
_AS_FAST = 1.03
_LESS = 0.95  # of the memory of a plan that did not fit after all


def make_plans(graph: Graph, job: VaeJob, options: list[VaePlan] | None = None) -> tuple[VaePlan, ...]:
    """Plans that may serve `job`, the one to run first; the rest are the fallbacks, each cheaper in memory.

    Args:
        options: `possible_plans` of this job, with whatever memory free.

    Raises:
        ModelInvalid: the mode or axis is unknown, or nothing fits in memory.
    """
    if options is None:
        options = possible_plans(graph, job)
    fitting = [plan for plan in options if job.free is None or max(plan.peak) <= job.free * _USABLE]
    if not fitting:
        raise ModelInvalid(_too_large(graph, options, job), expected="a plan that fits", hint=_hint(graph, job))
    exact = [plan for plan in fitting if plan.exactness != "approximate"]
    ordered = sorted(exact, key=lambda plan: (max(plan.peak), plan.cost) if job.lean else (plan.cost, max(plan.peak)))
    chosen = _roomy(ordered, job) if ordered else fitting[0]
    rest = sorted(fitting, key=lambda plan: (plan.exactness == "approximate", plan.cost))
    return tuple(_descending([chosen, *rest]))


def _roomy(ordered: list[VaePlan], job: VaeJob) -> VaePlan:
    """The first, or one of its mode as fast that leaves room."""
    first = ordered[0]
    if job.free is None:
        return first
    alike = (plan for plan in ordered if plan.mode == first.mode and plan.cost <= _AS_FAST * first.cost)
    return next((plan for plan in alike if max(plan.peak) <= _ROOMY * job.free), first)


def possible_plans(graph: Graph, job: VaeJob) -> list[VaePlan]:
    """All plans that may serve `job`, were there memory for them.

    Raises:
        ModelInvalid: the mode or axis is unknown.
    """
    check_mode(graph, job.mode, job.axis)
    if job.by_winograd:  # less memory without
        return [plan for each in (job, replace(job, by_winograd=False)) for plan in _plans(graph, each)]
    return _plans(graph, job)


def _plans(graph: Graph, job: VaeJob) -> list[VaePlan]:
    if job.mode != "auto":  # one rank, or a picture no larger than a tile: the plain way is what the mode comes to
        return MODES[job.mode].plan(graph, job) or SINGLE.plan(graph, job)
    plans = [plan for mode in _modes(graph) for plan in mode.plan(graph, job)]
    if not job.strict:
        return plans
    if job.lean:  # who asked for tiles never had the bits of the untiled decode, and gets its part of the work
        return [plan for plan in plans if job.workers == 1 or MODES[plan.mode].parallel]
    return [plan for plan in plans if plan.exactness == "strict"]  # what strict promises


def _modes(graph: Graph) -> list[Mode]:
    return [mode for mode in MODES.values() if mode.encodes or not isinstance(graph, EncoderGraph)]


def _descending(plans: list[VaePlan]) -> list[VaePlan]:
    """The first, and those that need clearly less than the one before: falling back must help."""
    kept = plans[:1]
    for plan in plans[1:]:
        if max(plan.peak) <= _LESS * max(kept[-1].peak):
            kept.append(plan)
    return kept


def check_mode(graph: Graph, mode: str, axis: str) -> None:
    """Raises ModelInvalid if there is no such mode or axis."""
    names = ("auto", *(known.name for known in _modes(graph) if known.parallel))
    if mode not in names:
        raise ModelInvalid(f"{graph.verb} mode {mode!r}", expected=f"one of {', '.join(names)}")
    if axis not in ("auto", "height", "width"):
        raise ModelInvalid(f"spatial axis {axis!r}", expected="auto, height or width")


def _too_large(graph: Graph, options: list[VaePlan], job: VaeJob) -> str:
    bytes_free = job.free or 0
    free = f"{bytes_free / 2**30:.2f} GiB free on the fullest rank, {_USABLE * bytes_free / 2**30:.2f} of it for a plan"
    needs = ", ".join(f"{plan.mode} {max(plan.peak) / 2**30:.2f} GiB" for plan in options)
    return f"no {graph.verb} of {list(job.latent)} fits: {free}, predicted {needs}"


def _hint(graph: Graph, job: VaeJob) -> str:
    encodes = isinstance(graph, EncoderGraph)
    if job.strict:
        lean = "mode='spatial' needs" if encodes else "mode='spatial' or 'tile' need"
        return f"strict=False or {lean} less memory, and so do more ranks"
    smaller = "" if encodes else ", or ask for uint8 output on one rank"
    return f"Free memory on that rank (offload the transformer), use more ranks{smaller}"
