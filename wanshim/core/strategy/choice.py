"""Which strategy is taken, and what is said of the others.

The first that can run, in the order of `Strategy`: a sample a GPU comes before micro-batches that overlap, and those
before stages that take turns. Sequence parallel changes how many samples are in a step, so it comes last. No speed is
measured: launch and memory leave no two strategies between which one would decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from wanshim.core.pipeline.schedule import pipeline_bound
from wanshim.core.strategy.job import TrainingJob
from wanshim.core.strategy.plan import Alternative
from wanshim.errors import PlacementInvalid
from wanshim.values import Strategy

DATA_PARALLEL = (Strategy.RESIDENT, Strategy.STREAM)
Fits = Mapping[Strategy, bool]  # whether the predicted peak fits the devices; a strategy that is not named does not


def choose(job: TrainingJob, fits: Fits, shortage: Callable[[], tuple[str, str]] = lambda: ("", "")) -> Strategy:
    """The strategy that the job requests, else the first that can run.

    Args:
        shortage: asked where none can run: what the leanest step lacks, and the fewer frames that would fit.

    Raises:
        PlacementInvalid: the requested one cannot run, or none can; the message says why of each.
    """
    barred = {strategy: why_not(strategy, job, fits.get(strategy, False)) for strategy in Strategy}
    wanted = job.request.strategy
    if wanted is not None and barred[wanted]:
        raise PlacementInvalid(f"plan {wanted.value}: {barred[wanted]}", hint=job.advice("choose"))
    taken = wanted or next((strategy for strategy in Strategy if not barred[strategy]), None)
    if taken is None:
        why = "; ".join(f"{strategy.value}: {reason}" for strategy, reason in barred.items())
        lacks, frames = shortage()
        asked = ("low_precision", *(["offload"] if job.request.offload is False else []), "without_side_models")
        ways = [frames or "fewer frames", *filter(None, map(job.advice, asked)), "more GPUs"]
        raise PlacementInvalid(
            "; ".join(filter(None, (f"no plan can run: {why}", lacks))), hint=f"What may help: {'; '.join(ways)}"
        )
    return taken


def explain(taken: Strategy, job: TrainingJob, fits: Fits) -> tuple[str, tuple[Alternative, ...]]:
    """Why this strategy, and every other one with what it would give or the reason why it cannot run."""
    barred = {strategy: why_not(strategy, job, fits.get(strategy, False)) for strategy in Strategy}
    alternatives = tuple(
        Alternative(
            strategy=one, gain=None if barred[one] else bound(one, job), reason=barred[one] or _not_taken(one, job)
        )
        for one in Strategy
        if one is not taken
    )
    return " ".join(_reasons(taken, job, fits)), alternatives


def bound(strategy: Strategy, job: TrainingJob) -> float:
    """At most so many times the samples a second of one GPU that holds everything."""
    if strategy is Strategy.PIPELINE:
        return pipeline_bound(job.num_gpus, job.accumulation)
    return 1.0 if strategy is Strategy.SPLIT else float(job.num_gpus)


def _not_taken(strategy: Strategy, job: TrainingJob) -> str:
    """Why a strategy that can run is not taken unasked, or nothing."""
    if strategy is not Strategy.SEQUENCE:
        return ""
    samples = job.processes // job.ranks
    how = job.advice("requested", strategy.value)
    return f"each sample over {job.ranks} GPUs, {samples} in place of {job.processes} at a time{f': {how}' * bool(how)}"


def why_not(strategy: Strategy, job: TrainingJob, fits: bool) -> str:
    """Why a strategy cannot run as the job was launched, or nothing: the first row of the table that is so."""
    gpus, processes, joined, ranks = job.num_gpus, job.local_processes, job.processes, job.ranks
    over_ranks, over_stages, everything = (Strategy.SEQUENCE,), (Strategy.PIPELINE, Strategy.SPLIT), tuple(Strategy)
    whole, to_launch = job.split_points is None, "each GPU needs one" + _launched(job, "N")
    rows = (
        (over_ranks, not whole, f"needs a process for each of {gpus} GPUs{_launched(job, gpus)}"),
        (over_ranks, joined < processes, f"{processes} processes were launched and not joined: each trains by itself"),
        (over_ranks, joined == 1, f"one process was launched, and {to_launch}"),
        (over_ranks, ranks < 2, f"one process was launched on each machine, and {to_launch}"),
        (over_ranks, joined % ranks, f"{joined} processes cannot be divided into groups of {ranks}"),
        (
            DATA_PARALLEL,
            gpus > 1 and processes < gpus,
            f"needs a process for each of {gpus} GPUs ({job.advice('processes', gpus)})",
        ),
        (over_stages, processes > 1, f"{processes} processes were launched, and each would need several GPUs"),
        (over_stages, gpus < 2, "there is one GPU"),
        (everything, strategy in job.excluded, job.excluded.get(strategy, "")),
        (
            (Strategy.PIPELINE,),
            job.accumulation == 1,
            "gradient accumulation is 1, and only accumulated micro-batches can overlap",
        ),
        (everything, not fits, "does not fit the devices"),
    )
    return next((text for strategies, is_so, text in rows if is_so and strategy in strategies), "")


def _launched(job: TrainingJob, gpus: object) -> str:
    how = job.advice("launch", gpus)
    return f" ({how})" if how else ""


def _reasons(taken: Strategy, job: TrainingJob, fits: Fits) -> list[str]:
    asked = job.request.strategy is not None
    gives = f"It gives at most {bound(taken, job):.2f}x of one GPU's samples a second."
    lines = ["It was asked for." if asked else gives]
    faster = [bound(one, job) for one in DATA_PARALLEL if fits.get(one, False) and bound(one, job) > bound(taken, job)]
    if faster and job.local_processes < job.num_gpus:
        lines.append(
            "Weights are streamed and samples divided between processes only: "
            f"{job.advice('processes', job.num_gpus)} would reach {max(faster):.2f}x at most."
        )
    if taken is Strategy.SPLIT:
        lines.append("A split gives room, not speed: raise gradient accumulation for a pipeline.")
    if job.split_points is not None and fits.get(Strategy.SEQUENCE, False) and not job.excluded.get(Strategy.SEQUENCE):
        lines.append(
            f"Sequence parallel would train each sample on {job.num_gpus} GPUs at once, at most {job.num_gpus:.2f}x"
            f"{_launched(job, job.num_gpus)}."
        )
    return lines
