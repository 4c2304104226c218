"""The decision on how a pipeline's forwards run: decided from the job and the machine's limits alone. No device is
touched here."""

from __future__ import annotations

from wanshim.core.model_split.plan import format_bytes

from .job import GenerationJob, Limits
from .plan import GenerationPlan, describe

# What travels around self-attention, as a share of what a rank's part of a forward needs: measured for the 14B Wan
# transformer over 2 GPUs at 480x832x81 and 720x1280x81 (benchmarks/results/generate_*_2xH200.json), 0.20 and 0.14.
# Before and behind its blocks every rank has all tokens: a trace of that alone needs 0.46 of the whole forward.
_EXCHANGE = 0.17


def decide(job: GenerationJob, limits: Limits) -> GenerationPlan:
    """The plan that uses the most GPUs; of two that use as many, the one whose guidance goes over GPUs, which is exact,
    and of two such the one whose other GPUs hold the models.

    With `guidance` and `sequence` 1 the pipeline runs as without wanshim, and `rejected` has the reasons.
    """
    held = [job.weights] if job.streamed is None else [job.weights, job.streamed]
    return max((_with_weights(job, limits, weights) for weights in held), key=lambda plan: plan.gpus)


def _with_weights(job: GenerationJob, limits: Limits, weights: int) -> GenerationPlan:
    """The plan whose other GPUs hold so many bytes of the models."""
    rejected: dict[str, str] = {"several GPUs": job.why_one} if len(job.devices) == 1 and job.why_one else {}
    chosen, used = (1, 1), job.devices[:1]

    def lacks(device: str, sequence: int) -> str:
        """That a device has too little memory, or nothing."""
        needed, free = _needed(job, weights, sequence), limits.available.get(device)
        if free is None or needed <= free:
            return ""
        return f"{format_bytes(needed)} would be needed, {format_bytes(free)} are available"

    for guidance in (2, 1):
        for sequence in range(len(job.devices) // guidance, 0, -1):
            way = (guidance, sequence)
            if way == (1, 1):
                continue
            devices = [job.devices[0], *(device for device in job.devices[1:] if not lacks(device, sequence))]
            reason = _why_not(job, *way, len(devices))
            if reason:
                rejected[describe(*way)] = reason
            elif way[0] * way[1] > chosen[0] * chosen[1]:
                chosen, used = way, tuple(devices[: way[0] * way[1]])
    idle = (device for device in job.devices if device not in used)
    unused = "no way to use it beside the others"
    rejected |= {device: lacks(device, chosen[1]) or unused for device in idle}
    at_home = job.own_streamed if job.is_offloaded else job.weights
    own = {} if at_home is None else {job.devices[0]: _needed(job, at_home, chosen[1])}
    peaks = own | dict.fromkeys(used[1:], _needed(job, weights, chosen[1]))
    return GenerationPlan(
        pipeline=job.pipeline,
        guidance=chosen[0],
        sequence=chosen[1],
        devices=used,
        replaces_offload=job.own_streamed is not None,
        streamed=weights != job.weights,
        peaks=peaks if job.working is not None and (chosen != (1, 1) or job.own_streamed is not None) else {},
        rejected=rejected,
        fast_forwards=job.fast_forwards,
        fast_vae=job.fast_vae,
    )


def _needed(job: GenerationJob, weights: int, sequence: int) -> int:
    """Bytes of the models and of a rank's part of a forward: of two ranks, which more do not need less than."""
    working = job.working or 0
    return weights + (working if sequence == 1 else round(working / 2 * (1 + _EXCHANGE)))


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
