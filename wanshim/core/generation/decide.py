"""How a pipeline's forwards run: decided from the job and the machine's limits alone. No device is touched here."""

from __future__ import annotations

from wanshim.core.model_split.plan import format_bytes

from .job import GenerationJob, Limits
from .plan import GenerationPlan, describe


def decide(job: GenerationJob, limits: Limits) -> GenerationPlan:
    """The plan that uses the most GPUs; of two that use as many, the one whose guidance goes over GPUs, which is exact.

    With `guidance` and `sequence` 1 the pipeline runs as without wanshim, and `rejected` has the reasons.
    """
    needed = job.weights + (job.working or 0)
    rejected: dict[str, str] = {}
    devices = [job.devices[0]]
    for device in job.devices[1:]:
        free = limits.available.get(device)
        if free is not None and needed > free:
            rejected[device] = f"{format_bytes(needed)} would be needed, {format_bytes(free)} are available"
        else:
            devices.append(device)
    chosen = (1, 1)
    for guidance in (2, 1):
        for sequence in range(len(job.devices) // guidance, 0, -1):
            way = (guidance, sequence)
            if way == (1, 1):
                continue
            reason = _why_not(job, *way, len(devices))
            if reason:
                rejected[describe(*way)] = reason
            elif way[0] * way[1] > chosen[0] * chosen[1]:
                chosen = way
    used = tuple(devices[: chosen[0] * chosen[1]])
    rejected |= dict.fromkeys(devices[len(used) :], "no way to use it beside the others")
    return GenerationPlan(
        pipeline=job.pipeline,
        guidance=chosen[0],
        sequence=chosen[1],
        devices=used,
        peaks={} if job.working is None or chosen == (1, 1) else dict.fromkeys(used, needed),
        rejected=rejected,
    )


def _why_not(job: GenerationJob, guidance: int, sequence: int, present: int) -> str:
    """Why a way cannot be gone, or nothing."""
    if job.at_most is not None and (guidance > job.at_most[0] or sequence > job.at_most[1]):
        return f"{describe(*job.at_most)} was asked for"
    if guidance > 1 and job.no_pair:
        return job.no_pair
    if sequence > 1 and job.no_sequence:
        return job.no_sequence
    if sequence > 1 and sequence > job.heads:
        return f"{job.heads} attention heads, of which each GPU computes whole ones"
    if guidance * sequence > present:
        return f"{guidance * sequence} GPUs with memory for it would be needed, {present} are there"
    return ""
