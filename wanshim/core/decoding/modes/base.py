"""What a mode is: a way to propose plans for a job, and a way to run one of them on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.operators.base import Operators
from wanshim.core.decoding.plan import DecodeJob, DecodePlan
from wanshim.core.decoding.ranks.exchange import Comm
from wanshim.core.decoding.ranks.output import Region, Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """One rank's side of a decode that has been planned: `latent` [B, Z, T, H, W] (before post_quant) to `sink`."""

    graph: DecoderGraph
    job: DecodeJob
    plan: DecodePlan
    comm: Comm
    ops: Operators
    latent: torch.Tensor
    sink: Sink

    def post_quant(self) -> torch.Tensor:
        """The whole latent, as the decoder's first convolution takes it."""
        return self.ops.post_quant(self.graph.post_quant, self.latent)

    def whole_picture(self, rank: int) -> Region:
        """All rows and columns, decoded by `rank`."""
        pixels = self.graph.scale_s * self.graph.patch_size
        return Region(rank=rank, rows=(0, self.latent.shape[3] * pixels), columns=(0, self.latent.shape[4] * pixels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to decode.

    Args:
        name: what a caller asks for, and what a plan says.
        plan: the plans of this mode for a job, the largest chunk first; none where it does not apply.
        run: runs a plan. Every rank calls it and hands the same regions to the sink.
        parallel: the ranks work together. False: each receiver decodes everything, and no caller asks for it by name.
    """

    name: str
    plan: Callable[[DecoderGraph, DecodeJob], list[DecodePlan]]
    run: Callable[[DecodeRun], None]
    parallel: bool = True


def spans(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    """`start` to `stop` in steps of `step`, the last one shorter."""
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]
