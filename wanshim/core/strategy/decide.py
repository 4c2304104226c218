"""Which of the ways to train on several GPUs is the fastest that fits, and why: arithmetic over measurements.

Time of a sample from its floating-point operations and the measured speed of a matrix product; a streamed
block hides behind compute as long as the link brings it in less time than its neighbours compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from wanshim.core.pipeline.schedule import pipeline_bound
from wanshim.core.strategy.speeds import Speeds
from wanshim.errors import PlacementInvalid

# A training step against the matrix product's speed. Only ratios between plans and the link depend on it.
EFFICIENCY = 0.65


class Plan(Enum):
    RESIDENT = "resident"  # DDP, the whole model on every GPU
    STREAM = "stream"  # DDP, part of the frozen weights streamed
    LANES = "lanes"  # one process, pipelined micro-batches
    SPLIT = "split"  # one process, the stages take turns


@dataclass(frozen=True)
class Job:
    """What is trained on one host.

    Args:
        tokens: of one sample.
        block_parameters: of one block.
        dim: the blocks' width, for attention's share.
        frozen_bytes: of all blocks' frozen weights.
        streamed_share: of them, how much waits on the host under streaming.
        accumulation: micro-batches a step and process.
        gpus: of this host.
        processes: of this host, as launched.
    """

    tokens: int
    num_blocks: int
    block_parameters: int
    dim: int
    frozen_bytes: int
    streamed_share: float
    accumulation: int
    gpus: int
    processes: int

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


@dataclass(frozen=True)
class Choice:
    """`gains`: of each plan that could run as launched, samples a second against one GPU with the whole model."""

    plan: Plan
    gains: Mapping[Plan, float]
    reason: str

    def __str__(self) -> str:
        return f"plan: {self.plan.value}. {self.reason}"


def choose(job: Job, speeds: Speeds, fits: Mapping[Plan, bool], wanted: Plan | None = None) -> Choice:
    """The fastest plan that fits.

    Args:
        fits: of each plan whether its predicted peak fits its devices; one that is not named does not.
        wanted: the user's choice, which stands if it can run.

    Raises:
        PlacementInvalid: nothing fits, or the wanted plan cannot run; the message says why of each.
    """
    rates = {plan: gain(plan, job, speeds) for plan in Plan}
    barred = {plan: _barred(plan, job, fits) for plan in Plan}
    possible = {plan: rates[plan] for plan in Plan if barred[plan] is None}
    if wanted is not None and wanted not in possible:
        raise PlacementInvalid(
            f"plan {wanted.value}: {barred[wanted]}", hint="WANSHIM_PLAN=auto chooses among the rest"
        )
    if not possible:
        why = "; ".join(f"{plan.value}: {reason}" for plan, reason in barred.items())
        raise PlacementInvalid(f"no plan can run: {why}", hint="Use fp8, checkpoint offload, fewer frames or more GPUs")
    # of equal ones the simpler: the order of Plan
    plan = wanted or max(possible, key=lambda p: round(possible[p], 2))
    return Choice(plan, possible, " ".join(_reasons(plan, job, speeds, fits, rates, barred, wanted)))


def gain(plan: Plan, job: Job, speeds: Speeds) -> float:
    """Samples a second over those of one GPU that holds everything."""
    if plan is Plan.RESIDENT:
        return float(job.gpus)
    if plan is Plan.STREAM:
        alone = sum(_halves(job, speeds))
        return job.gpus * alone / sum(max(half, link_seconds(job, speeds)) for half in _halves(job, speeds))
    if plan is Plan.LANES:
        return pipeline_bound(job.gpus, job.accumulation)
    return 1.0


def link_seconds(job: Job, speeds: Speeds) -> float:
    """For the streamed weights to come once; they come twice a sample, before forward and before backward."""
    return job.frozen_bytes * job.streamed_share / speeds.link


def _halves(job: Job, speeds: Speeds) -> tuple[float, float]:
    effective = speeds.flops * EFFICIENCY
    return job.forward_flops / effective, job.backward_flops / effective


def _barred(plan: Plan, job: Job, fits: Mapping[Plan, bool]) -> str | None:
    ddp = plan in (Plan.RESIDENT, Plan.STREAM)
    if ddp and job.gpus > 1 and job.processes < job.gpus:
        return f"needs a process for each of {job.gpus} GPUs (accelerate launch --num_processes {job.gpus})"
    if not ddp and job.processes > 1:
        return f"{job.processes} processes were launched, and each would need several GPUs"
    if not ddp and job.gpus < 2:
        return "there is one GPU"
    if plan is Plan.LANES and job.accumulation == 1:
        return "gradient accumulation is 1, and only accumulated micro-batches can overlap"
    return None if fits.get(plan, False) else "does not fit the devices"


def _reasons(
    plan: Plan,
    job: Job,
    speeds: Speeds,
    fits: Mapping[Plan, bool],
    rates: Mapping[Plan, float],
    barred: Mapping[Plan, str | None],
    wanted: Plan | None,
) -> list[str]:
    forward, backward = _halves(job, speeds)
    hides = "hides" if link_seconds(job, speeds) <= forward else "does not hide"
    lines = ["It was asked for." if wanted else f"It gives at most {rates[plan]:.2f}x of one GPU's samples a second."]
    lines.append(
        f"Measured: {speeds}; {job.tokens} tokens take about {forward + backward:.1f} s on one GPU, and the streamed "
        f"weights {link_seconds(job, speeds):.1f} s over the link, twice, which {hides} "
        f"behind a forward of {forward:.1f} s."
    )
    others = [p for p in Plan if p is not plan]
    lines += [f"{p.value.capitalize()}: {barred[p] or f'at most {rates[p]:.2f}x'}." for p in others]
    better = [p for p in (Plan.RESIDENT, Plan.STREAM) if fits.get(p, False) and rates[p] > rates[plan] + 0.01]
    if better and job.processes < job.gpus:
        lines.append(
            f"Weights are streamed and samples divided between processes only: accelerate launch --num_processes "
            f"{job.gpus} would reach {max(rates[p] for p in better):.2f}x."
        )
    if plan is Plan.SPLIT:
        lines.append("A split gives room, not speed: raise gradient accumulation for lanes.")
    return lines
