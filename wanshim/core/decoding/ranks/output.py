"""The output of frames or latents: to one rank or all, in the model's dtype or uint8, as a whole or chunk by chunk.

Ranks hand in regions in an order they all know; only ranks that asked for output hold more than their own regions. With
a callback no rank holds a whole video: blocks of frames go to the callback in order, through a queue of fixed length,
so a slow consumer slows the decode instead of filling memory.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wanshim.errors import ModelInvalid, RanksFailed

from .exchange import Comm

OnChunk = Callable[[torch.Tensor, int], None]
Finish = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
_STOP = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """The output that the caller wants.

    Args:
        ranks: the ranks (within the group) that receive frames; None: all.
        uint8: frames as uint8 in 0..255, `round((x + 1) * 127.5)`, instead of the model's dtype in -1..1.
        on_chunk: called with (frames [B, C, T, H, W], index of the first) in order, on every receiving rank.
        depth: how many blocks may wait for the callback before the decode waits.
    """

    ranks: tuple[int, ...] | None = None
    uint8: bool = False
    on_chunk: OnChunk | None = None
    depth: int = 2


def read_receivers(output: str | int | Sequence[int]) -> tuple[int, ...] | None:
    """The ranks that `output` names: "all" (None), 0, "rank0", or several, as (0, 2).

    Raises:
        ModelInvalid: `output` is something else.
    """
    if isinstance(output, str):
        if output == "all":
            return None
        named = re.fullmatch(r"rank(\d+)", output)
        found: list[Any] = [int(named[1])] if named else []
    else:
        found = list(output) if isinstance(output, Sequence) else [output]
    if not found or len(set(found)) < len(found) or not all(type(rank) is int and rank >= 0 for rank in found):
        raise ModelInvalid(
            f"output={output!r}",
            expected="'all', a rank of the group (0 or 'rank0') or several different ones ((0, 2))",
            hint="Ranks are counted within the group, from 0",
        )
    return tuple(found)


def check_receivers(ranks: tuple[int, ...] | None, size: int) -> None:
    """Raises:
    ModelInvalid: a group of `size` ranks does not hold all of `ranks`: their frames would reach nobody.
    """
    if ranks is not None and max(ranks) >= size:
        raise ModelInvalid(
            f"output names rank {max(ranks)} of a group of {size}",
            expected=f"ranks 0 to {size - 1}",
            hint="Ranks are counted within the group, not within the job",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One rank's part of a block of frames, in rows and columns of the output."""

    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]


class Sink:
    """Collects the regions of one decode.

    Args:
        shape: [B, C, T, H, W] of the whole output.
        finish: from what the network gives (overwritten) to the output's values, in the dtype it is given.
        dtype: of the output handed out.
    """

    def __init__(
        self,
        comm: Comm,
        spec: OutputSpec,
        shape: tuple[int, ...],
        finish: Finish,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.comm = comm
        self.receivers = spec.ranks if spec.ranks is not None else tuple(range(comm.size))
        self.shape = shape
        self._finish = finish
        self.dtype = torch.uint8 if spec.uint8 else dtype
        self.device = device
        self.receiving = comm.rank in self.receivers
        self.pump = ChunkPump(spec.on_chunk, spec.depth, comm.deadline) if spec.on_chunk and self.receiving else None
        self.video: torch.Tensor | None = None
        if self.receiving and spec.on_chunk is None:
            self.video = torch.empty(shape, dtype=self.dtype, device=device)

    @property
    def delivered(self) -> bool:
        """Whether the callback has frames, or is about to get some."""
        return self.pump is not None and self.pump.begun

    def finish(self, values: torch.Tensor) -> torch.Tensor:
        return self._finish(values, self.dtype)

    def deliver(self, frames: tuple[int, int], regions: list[Region], mine: list[torch.Tensor]) -> None:
        """Hand in a block of frames; every rank calls this with the same `frames` and `regions`.

        Args:
            mine: this rank's regions, finished, in the order they have in `regions`.
        """
        own = iter(mine)
        local = {region: next(own) for region in regions if region.rank == self.comm.rank}
        block = self._block(frames)
        sends = [
            (part.contiguous(), receiver)
            for part in local.values()
            for receiver in self.receivers
            if receiver != self.comm.rank
        ]
        waiting = []
        for region in regions:
            if block is None:
                break
            target = block[:, :, :, slice(*region.rows), slice(*region.columns)]
            if region.rank == self.comm.rank:
                target.copy_(local[region])
            else:
                buffer = (
                    target
                    if target.is_contiguous()
                    else torch.empty_like(target, memory_format=torch.contiguous_format)
                )
                waiting.append((target, buffer, region.rank))
        self.comm.exchange(f"output of frames {frames[0]} to {frames[1]}", sends, [(b, rank) for _, b, rank in waiting])
        for target, buffer, _ in waiting:
            if buffer.data_ptr() != target.data_ptr():
                target.copy_(buffer)
        if self.pump is not None and block is not None:
            self.pump.put(block, frames[0])

    def close(self) -> torch.Tensor | None:
        """Wait for the callback to have taken everything; the video on a rank that holds one."""
        if self.pump is not None:
            self.pump.close()
        return self.video

    def cancel(self) -> None:
        """Stop the callback's thread without waiting for what is queued."""
        if self.pump is not None:
            self.pump.cancel()

    def _block(self, frames: tuple[int, int]) -> torch.Tensor | None:
        if not self.receiving:
            return None
        if self.video is not None:
            return self.video[:, :, slice(*frames)]
        b, c, _, h, w = self.shape
        return torch.empty((b, c, frames[1] - frames[0], h, w), dtype=self.dtype, device=self.device)


class ChunkPump:
    """Calls `on_chunk` in a thread of its own, `depth` blocks behind at most; no wait for it outlasts `patience`."""

    def __init__(self, on_chunk: OnChunk, depth: int, patience: float) -> None:
        self._on_chunk = on_chunk
        self._patience = patience
        self._queue: queue.Queue[tuple[torch.Tensor, int, torch.cuda.Event | None] | None] = queue.Queue(depth)
        self._error: BaseException | None = None
        self.begun = False
        self._thread = threading.Thread(target=self._run, name="wanshim-on-chunk", daemon=True)
        self._thread.start()

    def put(self, block: torch.Tensor, start: int) -> None:
        """Queue a block; waits while the queue is full, raises what the callback raised."""
        event, self.begun = None, True
        if block.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._enqueue((block, start, event))
        self._check()

    def close(self) -> None:
        self._enqueue(_STOP)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            raise self._stuck()
        self._check()

    def cancel(self) -> None:
        """Stop at the next block; a callback that never returns is left behind in its daemon thread."""
        self._on_chunk = _ignore
        with contextlib.suppress(queue.Full):
            self._queue.put(_STOP, timeout=1.0)

    def _enqueue(self, item: tuple[torch.Tensor, int, torch.cuda.Event | None] | None) -> None:
        try:
            self._queue.put(item, timeout=self._patience)
        except queue.Full:
            raise self._stuck() from None

    def _stuck(self) -> RanksFailed:
        return RanksFailed(
            f"on_chunk took no block for {self._patience:g} s",
            expected="the callback to return",
            hint="Hand the frames to a queue of your own, or raise the deadline",
        )

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not _STOP:
            block, start, event = item
            if self._error is not None:
                continue  # drained, so that the decode is never stuck on a full queue
            try:
                if event is not None:
                    torch.cuda.set_device(block.device)
                    torch.cuda.current_stream().wait_event(event)
                self._on_chunk(block, start)
            except BaseException as error:
                self._error = error
            del item, block


def _ignore(block: torch.Tensor, start: int) -> None:
    """The callback of a cancelled pump."""
