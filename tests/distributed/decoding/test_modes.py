"""A new mode is one file and one entry in the table: this file is such a mode, and two ranks decode with it."""

from __future__ import annotations

from functools import partial

import torch

from wanshim.core.decoding import VaePlan, parallelize_decode
from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.modes import MODES, Mode
from wanshim.core.decoding.modes.network import History, VaeRun, run_in_order
from wanshim.core.decoding.plan import VaeJob, build_plan

from .ranks import run_ranks, values
from .tiny import make_latent, make_vae


def _plan(graph: DecoderGraph, job: VaeJob) -> list[VaePlan]:
    return [
        build_plan(
            graph,
            job,
            mode="last",
            exactness="strict",
            chunk=1,
            peak=(0,) * job.ranks,
            cost=0.5,
            split_text="everything on the last rank",
            reason="a test",
        )
    ]


def _run(run: VaeRun) -> None:
    """The last rank decodes everything and sends the frames to the others."""
    source, last = run.source(), run.comm.size - 1
    frames = range(run.job.latent[2])
    decoded = run_in_order([(t, t + 1) for t in frames], partial(run.chunk, source), History().answer)
    for t in frames:
        mine = [run.sink.finish(next(decoded))] if run.comm.rank == last else []
        run.sink.deliver(run.graph.output_range(t, t + 1), [run.whole_picture(last)], mine)


LAST = Mode(name="last", plan=_plan, run=_run)


def decode_with_last(rank: int, size: int) -> list[tuple[bool, str, str]]:
    MODES[LAST.name] = LAST
    vae, latent = make_vae("2.1"), make_latent(3)
    reference = vae.decode(latent).sample
    found = []
    for mode in ("last", "auto"):
        handle = parallelize_decode(vae, mode=mode)
        equal = torch.equal(vae.decode(latent).sample, reference)
        assert handle.plan is not None
        found.append((equal, handle.plan.mode, str(handle.plan).splitlines()[1]))
        handle.remove()
    return found


def test_new_mode_in_the_table_is_chosen_by_name_and_by_cost_and_decodes_the_same_bits() -> None:
    expected = (True, "last", "  split    everything on the last rank; 1 latent frame per step")
    assert values(run_ranks(decode_with_last, 2)) == [[expected] * 2] * 2
