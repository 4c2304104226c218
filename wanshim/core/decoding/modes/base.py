"""What a mode is: a way to propose plans for a job, and a way to run one of them on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from wanshim.core.decoding.model.encoder_graph import EncoderGraph, Graph
from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.operators.base import Operators
from wanshim.core.decoding.operators.layout import unpatchify
from wanshim.core.decoding.plan import VaeJob, VaePlan
from wanshim.core.decoding.ranks.exchange import Comm
from wanshim.core.decoding.ranks.output import Finish, Region, Sink

from .network import Chunk, run_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeRun:
    """One rank's side of a decode or an encode that has been planned.

    Args:
        given: the whole input, on every rank: a latent [B, Z, T, h, w] or a video [B, C, T, H, W].
        sink: where the parts of the output go.
    """

    graph: Graph
    job: VaeJob
    plan: VaePlan
    comm: Comm
    ops: Operators
    given: torch.Tensor
    sink: Sink

    def source(self) -> torch.Tensor:
        """The whole input, as the chunks take parts of it."""
        if isinstance(self.graph, EncoderGraph):
            return self.given
        return self.ops.quant(self.graph.post_quant, self.given)

    def chunk(self, source: torch.Tensor, start: int, stop: int) -> Chunk:
        """Computes latent frames `start` to `stop` of `source`, or of a band of it."""
        return run_chunk(self.graph, self.ops, self.graph.cut(source, 2, start, stop), first=start == 0)

    def close(self) -> torch.Tensor | None:
        """The whole output, on a rank that receives it."""
        output = self.sink.close()
        if output is None or not isinstance(self.graph, EncoderGraph):
            return output
        return self.ops.quant(self.graph.quant, output)

    def whole_picture(self, rank: int) -> Region:
        """All rows and columns, computed by `rank`."""
        height, width = self.graph.output_shape(self.job.latent)[3:]
        return Region(rank=rank, rows=(0, height), columns=(0, width))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to decode and to encode.

    Args:
        name: what a caller asks for, and what a plan says.
        plan: the plans of this mode for a job, the largest chunk first; none where it does not apply.
        run: runs a plan. Every rank calls it and hands the same regions to the sink.
        parallel: the ranks work together. False: each receiver computes everything, and no caller asks for it by name.
        encodes: it can encode too.
    """

    name: str
    plan: Callable[[Any, VaeJob], list[VaePlan]]
    run: Callable[[VaeRun], None]
    parallel: bool = True
    encodes: bool = True


def to_frames(graph: DecoderGraph, patches: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Patches as a decoder gives them (overwritten) to frames: clamped as the framework does, unfolded, in `dtype`."""
    if graph.clamped or dtype == torch.uint8:
        patches = patches.clamp_(-1.0, 1.0)
    if dtype == torch.uint8:
        patches = patches.float().add_(1.0).mul_(127.5).round_().to(torch.uint8)
    return unpatchify(patches, graph.patch_size).to(dtype)


def finisher(graph: Graph) -> Finish:
    """From the network's values to those that ranks send each other."""
    return torch.Tensor.to if isinstance(graph, EncoderGraph) else partial(to_frames, graph)
