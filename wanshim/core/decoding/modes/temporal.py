"""Temporal mode: each rank owns a run of latent frames and all ranks go through the layers together.

A causal convolution needs the last two input frames of the rank before, so one message per convolution and boundary
is all the traffic of a decode (32 for Wan, against some 700 to 1000 halo rounds of a split in space), attention needs
none, and height and width may be anything. Looking back by overlap instead would take 37 latent frames. Every operator
sees the shapes it sees on one device, which is why strict operators stay bit-identical. The price is memory: a rank
holds a layer's activations for its whole run.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.operators.base import Operators
from wanshim.core.decoding.operators.window import Window
from wanshim.core.decoding.ranks.exchange import Comm, landing, packed

from .driver import run_in_lockstep
from .network import decode_chunk


def decode_run(
    graph: DecoderGraph, ops: Operators, comm: Comm, latent: torch.Tensor, runs: tuple[tuple[int, int], ...], chunk: int
) -> list[torch.Tensor]:
    """Decode this rank's run of `latent` (the whole video's, after post_quant) in chunks of `chunk` latent frames."""
    start, stop = runs[comm.rank]
    chunks = [
        decode_chunk(graph, ops, latent[:, :, at : min(at + chunk, stop)], first=at == 0)
        for at in range(start, stop, chunk)
    ]
    if not chunks:
        return []
    relay = Relay(comm, last=max(rank for rank, run in enumerate(runs) if run[0] < run[1]))
    return run_in_lockstep(chunks, relay.complete)


class Relay:
    """Takes each convolution's past from the rank before and gives its tail to the rank after."""

    def __init__(self, comm: Comm, last: int) -> None:
        self.comm = comm
        self.last = last

    def complete(self, windows: list[Window]) -> None:
        """Fill the past of a layer's windows, in the order of time."""
        if not windows[0].history:
            return
        fresh = sum(window.frames for window in windows)
        tail = _last_frames(windows) if fresh >= windows[0].history else None
        self._from_before(windows[0], tail)
        for before, window in pairwise(windows):
            window.past().copy_(before.tail())
        if tail is None:  # the run is shorter than the past it hands on: what came from before goes through
            self._to_after(windows[0].conv.name, packed(windows[-1].tail()))
        self.comm.checkpoint()  # a layer of a whole run is many launches

    def _from_before(self, window: Window, tail: torch.Tensor | None) -> None:
        rank, name = self.comm.rank, window.conv.name
        sends = [(tail, rank + 1)] if tail is not None and rank < self.last else []
        if rank == 0:
            window.past().zero_()
            self.comm.exchange(name, sends, [])
            return
        room = window.past()
        buffer = landing(room)
        self.comm.exchange(name, sends, [(buffer, rank - 1)])
        if buffer.data_ptr() != room.data_ptr():
            room.copy_(buffer)

    def _to_after(self, name: str, tail: torch.Tensor) -> None:
        if self.comm.rank < self.last:
            self.comm.exchange(name, [(tail, self.comm.rank + 1)], [])


def _last_frames(windows: list[Window]) -> torch.Tensor:
    """The last frames of the run, dense, from own frames alone."""
    last = windows[-1]
    if last.frames >= last.history:
        return packed(last.tail())
    fresh = [window.fresh() for window in windows[-last.history :]]
    return packed(torch.cat(fresh, 2)[:, :, -last.history :])
