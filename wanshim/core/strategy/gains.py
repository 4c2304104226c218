"""How much faster than one GPU each strategy is, and which is the fastest that can run: arithmetic over measurements.

Time of a sample from its floating-point operations and the measured speed of a matrix product; a streamed block hides
behind compute as long as the link brings it in less time than its neighbours compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wanshim.core.pipeline.schedule import pipeline_bound
from wanshim.core.strategy.job import Strategy, TrainingJob
from wanshim.core.strategy.plan import Alternative
from wanshim.core.strategy.speeds import Speeds
from wanshim.errors import PlacementInvalid

# A training step against the matrix product's speed. Only ratios between strategies and the link depend on it.
EFFICIENCY = 0.65
DATA_PARALLEL = (Strategy.RESIDENT, Strategy.STREAM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One sample's arithmetic, in floating-point operations and bytes.

    Args:
        tokens: of one sample.
        num_blocks, block_parameters, dim: of the model; the width gives attention's part.
        frozen_bytes: of all blocks' frozen weights.
        streamed_share: of them, how much waits in host memory under streaming.
    """

    tokens: int
    num_blocks: int
    block_parameters: int
    dim: int
    frozen_bytes: int
    streamed_share: float

    @property
    def linear_flops(self) -> float:
        return 2.0 * self.num_blocks * self.block_parameters * self.tokens

    @property
    def attention_flops(self) -> float:
        return 4.0 * self.num_blocks * self.dim * self.tokens**2

    @property
    def forward_flops(self) -> float:
        return self.linear_flops + self.attention_flops

    @property
    def backward_flops(self) -> float:
        """Recomputation, the gradients of activations (the base is frozen), and attention's backward (2.5x)."""
        return self.forward_flops + self.linear_flops + 2.5 * self.attention_flops

    def seconds(self, speeds: Speeds) -> tuple[float, float]:
        """Of forward and backward on one GPU."""
        effective = speeds.flops * EFFICIENCY
        return self.forward_flops / effective, self.backward_flops / effective

    def link_seconds(self, speeds: Speeds) -> float:
        """For the streamed weights to come once; they come twice a sample, before forward and before backward."""
        return self.frozen_bytes * self.streamed_share / speeds.link


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The strategy to take, every other one with its gain or the reason why it cannot run, and the measurements."""

    strategy: Strategy
    alternatives: tuple[Alternative, ...]
    reason: str


def gain(strategy: Strategy, job: TrainingJob, work: Workload, speeds: Speeds) -> float:
    """Samples a second over those of one GPU that holds everything."""
    if strategy is Strategy.RESIDENT:
        return float(job.num_gpus)
    if strategy is Strategy.STREAM:
        halves, link = work.seconds(speeds), work.link_seconds(speeds)
        return job.num_gpus * sum(halves) / sum(max(half, link) for half in halves)
    if strategy is Strategy.PIPELINE:
        return pipeline_bound(job.num_gpus, job.accumulation)
    return float(job.num_gpus) if strategy is Strategy.SEQUENCE else 1.0


def compare(job: TrainingJob, work: Workload, speeds: Speeds, fits: Mapping[Strategy, bool]) -> Comparison:
    """The fastest strategy that fits, or the one that the job requests. Sequence parallel changes how many samples are
    in a step, so it is taken unasked only if no other one fits.

    Args:
        fits: of each strategy whether its predicted peak fits its devices; one that is not named does not.

    Raises:
        PlacementInvalid: nothing fits, or the requested strategy cannot run; the message says why of each.
    """
    gains = {strategy: gain(strategy, job, work, speeds) for strategy in Strategy}
    barred = {strategy: why_not(strategy, job, fits.get(strategy, False)) for strategy in Strategy}
    possible = {strategy: gains[strategy] for strategy in Strategy if not barred[strategy]}
    wanted = job.request.strategy
    if wanted is not None and wanted not in possible:
        raise PlacementInvalid(f"plan {wanted.value}: {barred[wanted]}", hint=job.say("choose"))
    if not possible:
        why = "; ".join(f"{strategy.value}: {reason}" for strategy, reason in barred.items())
        raise PlacementInvalid(f"no plan can run: {why}", hint="Use fp8, checkpoint offload, fewer frames or more GPUs")
    unasked = {one: gain for one, gain in possible.items() if one is not Strategy.SEQUENCE} or possible
    taken = wanted or max(unasked, key=lambda strategy: round(unasked[strategy], 2))
    return Comparison(
        strategy=taken,
        alternatives=tuple(
            Alternative(
                strategy=one, gain=None if barred[one] else gains[one], reason=barred[one] or _not_taken(one, job)
            )
            for one in Strategy
            if one is not taken
        ),
        reason=" ".join(_reasons(taken, job, work, speeds, fits, gains)),
    )


def _not_taken(strategy: Strategy, job: TrainingJob) -> str:
    """Why a strategy that can run is not taken however fast it is, or nothing."""
    if strategy is not Strategy.SEQUENCE:
        return ""
    samples = job.processes // job.ranks
    how = job.say("requested", strategy.value)
    return f"each sample over {job.ranks} GPUs, {samples} in place of {job.processes} at a time{f': {how}' * bool(how)}"


def why_not(strategy: Strategy, job: TrainingJob, fits: bool) -> str:
    """Why a strategy cannot run as the job was launched, or nothing."""
    gpus, processes = job.num_gpus, job.local_processes
    if strategy is Strategy.SEQUENCE:
        return _why_not_sequence(job) or ("" if fits else "does not fit the devices")
    if strategy in DATA_PARALLEL and gpus > 1 and processes < gpus:
        return f"needs a process for each of {gpus} GPUs ({job.say('processes', gpus)})"
    if strategy not in DATA_PARALLEL and processes > 1:
        return f"{processes} processes were launched, and each would need several GPUs"
    if strategy not in DATA_PARALLEL and gpus < 2:
        return "there is one GPU"
    if strategy in job.excluded:
        return job.excluded[strategy]
    if strategy is Strategy.PIPELINE and job.accumulation == 1:
        return "gradient accumulation is 1, and only accumulated micro-batches can overlap"
    return "" if fits else "does not fit the devices"


def _why_not_sequence(job: TrainingJob) -> str:
    if job.split_points is not None:
        return f"needs a process for each of {job.num_gpus} GPUs{_launched(job, job.num_gpus)}"
    if job.processes < job.local_processes:
        return f"{job.local_processes} processes were launched and not joined: each trains by itself"
    if job.processes == 1:
        return f"one process was launched, and each GPU needs one{_launched(job, 'N')}"
    if job.ranks < 2:
        return f"one process was launched on each machine, and each GPU needs one{_launched(job, 'N')}"
    if job.processes % job.ranks:
        return f"{job.processes} processes cannot be divided into groups of {job.ranks}"
    return job.excluded.get(Strategy.SEQUENCE, "")


def _launched(job: TrainingJob, gpus: object) -> str:
    how = job.say("launch", gpus)
    return f" ({how})" if how else ""


def _reasons(
    taken: Strategy, job: TrainingJob, work: Workload, speeds: Speeds,
    fits: Mapping[Strategy, bool], gains: Mapping[Strategy, float],
) -> list[str]:  # fmt: skip
    (forward, backward), link = work.seconds(speeds), work.link_seconds(speeds)
    hides = "hides" if link <= forward else "does not hide"
    lines = [
        f"It gives at most {gains[taken]:.2f}x of one GPU's samples a second."
        if job.request.strategy is None
        else "It was asked for.",
        f"Measured: {speeds}; {work.tokens} tokens take about {forward + backward:.1f} s on one GPU, and the streamed "
        f"weights {link:.1f} s over the link, twice, which {hides} behind a forward of {forward:.1f} s.",
    ]
    faster = [gains[one] for one in DATA_PARALLEL if fits.get(one, False) and gains[one] > gains[taken] + 0.01]
    if faster and job.local_processes < job.num_gpus:
        lines.append(
            "Weights are streamed and samples divided between processes only: "
            f"{job.say('processes', job.num_gpus)} would reach {max(faster):.2f}x."
        )
    if taken is Strategy.SPLIT:
        lines.append("A split gives room, not speed: raise gradient accumulation for a pipeline.")
    if job.split_points is not None and fits.get(Strategy.SEQUENCE, False) and not job.excluded.get(Strategy.SEQUENCE):
        lines.append(
            f"Sequence parallel would train each sample on {job.num_gpus} GPUs at once, at most {job.num_gpus:.2f}x"
            f"{_launched(job, job.num_gpus)}."
        )
    return lines
