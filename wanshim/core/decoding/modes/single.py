"""Single: each rank that wants the output computes all of it, chunk after chunk, and no rank sends anything."""

from __future__ import annotations

from functools import partial

from wanshim.core.decoding.model.graph import Graph
from wanshim.core.decoding.plan import Mode, VaeJob, VaePlan, build_plan, frame_work, spans

from .network import History, VaeRun, run_in_order


def _plans(graph: Graph, job: VaeJob) -> list[VaePlan]:
    return [_plan(graph, job, chunk) for chunk in (job.chunks() if job.workers == 1 else (1,))]


def _plan(graph: Graph, job: VaeJob, chunk: int) -> VaePlan:
    t = job.latent[2]
    peak = job.working_bytes(graph, frames=chunk, chunk=chunk, first=chunk == t, keeps_history=t > chunk)
    return build_plan(
        graph,
        job,
        mode="single",
        exactness="strict",
        chunk=chunk,
        peak=(peak,) * job.ranks,
        cost=frame_work(0, t) * (1 + 0.02 / chunk),
        reason="one rank computes it whole" if job.ranks > 1 else "one rank, and the whole picture fits",
    )


def _run(run: VaeRun) -> None:
    source = run.source()
    if not run.sink.receiving:
        return
    steps = spans(0, run.job.latent[2], run.plan.chunk)
    picture = run.whole_picture(run.comm.rank)
    decoded = run_in_order(steps, partial(run.chunk, source), History().answer)
    for (start, stop), patches in zip(steps, decoded):
        run.sink.deliver(run.graph.output_range(start, stop), [picture], [run.sink.finish(patches)])


SINGLE = Mode(name="single", plan=_plans, run=_run, parallel=False)
