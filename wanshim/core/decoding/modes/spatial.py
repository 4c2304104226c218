"""Spatial mode: each rank owns a band of rows or columns and decodes chunk after chunk, as one device would.

Before a convolution with a reach, neighbours exchange one row (or column) of the new frames, point to point. The
received edge becomes part of the window, and so of the history: older frames' edges never travel twice. Attention
keeps its queries local and gathers keys and values. Bands may differ in size; nothing is padded to fit, because a
padded latent changes the picture (attention reads the padding).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from wanshim.core.decoding.model.graph import DecoderGraph
from wanshim.core.decoding.operators.base import Operators
from wanshim.core.decoding.operators.window import Tokens, Window
from wanshim.core.decoding.ranks.exchange import Comm, landing, packed

from .driver import History, run_in_order
from .network import Request, decode_chunk


def decode_band(
    graph: DecoderGraph,
    ops: Operators,
    comm: Comm,
    latent: torch.Tensor,
    bands: tuple[tuple[int, int], ...],
    dim: int,
    chunk: int,
) -> Iterator[torch.Tensor | None]:
    """Decode this rank's band of `latent` (the whole picture, after post_quant); one item per chunk, in time."""
    start, stop = bands[comm.rank]
    mine = latent.narrow(dim, start, stop - start)
    if start == stop:
        yield from (None for _ in range(0, latent.shape[2], chunk))
        return
    chunks = (
        decode_chunk(graph, ops, mine[:, :, at : at + chunk], first=at == 0) for at in range(0, latent.shape[2], chunk)
    )
    yield from run_in_order(chunks, Neighbours(comm, bands, dim).answer)


class Neighbours:
    """Answers a band's requests: edges from the neighbours, tokens from all, the past from the own history."""

    def __init__(self, comm: Comm, bands: tuple[tuple[int, int], ...], dim: int) -> None:
        self.comm = comm
        self.widths = [stop - start for start, stop in bands]
        self.dim = dim
        self.history = History()

    def answer(self, request: Request) -> torch.Tensor | None:
        if isinstance(request, Tokens):
            return self._gather(request)
        if request.conv.reach:
            self._swap_edges(request)
        self.history.complete(request)
        return None

    def _swap_edges(self, window: Window) -> None:
        peers = [(side, peer) for side, peer in ((0, self.comm.rank - 1), (1, self.comm.rank + 1)) if self._has(peer)]
        sends = [(packed(window.edge(self.dim, side)), peer) for side, peer in peers]
        rooms = [(window.halo(self.dim, side), peer) for side, peer in peers]
        receives = [(landing(room), peer) for room, peer in rooms]
        self.comm.exchange(window.conv.name, sends, receives)
        for (room, _), (buffer, _) in zip(rooms, receives):
            if buffer.data_ptr() != room.data_ptr():
                room.copy_(buffer)

    def _gather(self, tokens: Tokens) -> torch.Tensor:
        mine = tokens.data.contiguous()
        b, one, count, channels = mine.shape
        per_unit = count // self.widths[self.comm.rank]
        parts = [
            mine if rank == self.comm.rank else mine.new_empty((b, one, per_unit * width, channels))
            for rank, width in enumerate(self.widths)
        ]
        others = [rank for rank, width in enumerate(self.widths) if width and rank != self.comm.rank]
        self.comm.exchange(tokens.name, [(mine, rank) for rank in others], [(parts[rank], rank) for rank in others])
        return torch.cat(parts, 2)

    def _has(self, rank: int) -> bool:
        return 0 <= rank < self.comm.size and self.widths[rank] > 0
