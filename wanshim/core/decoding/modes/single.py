"""Single: each rank that wants frames decodes the whole video, chunk after chunk, and no rank sends anything."""

from __future__ import annotations

from wanshim.core.decoding.memory import Extent, working_bytes
from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.plan import DecodeJob, DecodePlan, build_plan, frame_work

from .base import DecodeRun, Mode, spans
from .driver import History, run_in_order
from .network import decode_chunk


def _plans(graph: DecoderGraph, job: DecodeJob) -> list[DecodePlan]:
    return [_plan(graph, job, chunk) for chunk in (job.chunks() if job.workers == 1 else (1,))]


def _plan(graph: DecoderGraph, job: DecodeJob, chunk: int) -> DecodePlan:
    b, _, t, h, w = job.latent
    extent = Extent(batch=b, frames=chunk, chunk=chunk, height=h, width=w, first=chunk == t)
    peak = working_bytes(graph, extent, job.itemsize, job.passes, keeps_history=t > chunk)
    return build_plan(
        graph,
        job,
        mode="single",
        exactness="bit-identical",
        chunk=chunk,
        peak=(peak,) * job.ranks,
        cost=frame_work(0, t) * (1 + 0.02 / chunk),
        reason="one rank decodes it whole" if job.ranks > 1 else "one rank, and the whole picture fits",
    )


def _run(run: DecodeRun) -> None:
    latent = run.post_quant()
    if not run.sink.receiving:
        return
    steps = spans(0, latent.shape[2], run.plan.chunk)
    chunks = (decode_chunk(run.graph, run.ops, latent[:, :, a:b], first=a == 0) for a, b in steps)
    picture = run.whole_picture(run.comm.rank)
    for (start, stop), patches in zip(steps, run_in_order(chunks, History().answer)):
        run.sink.deliver(run.graph.frame_range(start, stop), [picture], [run.sink.finish(patches)])


SINGLE = Mode(name="single", plan=_plans, run=_run, parallel=False)
