"""The way of one device to host memory and back, beside the device's own work."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from wanshim.core.shared.host_memory import Buffer, view_of

# How many tensors may be on their way to the host. The work that follows waits, on the device, for the one
# before: so their memory is free again at a fixed place in the program, however far the host is ahead.
IN_FLIGHT = 2


@dataclass(eq=False)
class Transfer:
    """A tensor's copy on the host, and the tensor itself until the copy is known to be whole."""

    source: torch.Tensor | None
    version: int
    like: torch.Tensor  # meta: shape, strides, dtype
    buffer: Buffer
    stream: torch.cuda.Stream | None  # where the source was computed
    sent: torch.cuda.Event | None = None
    spoilt: bool = False  # written to while it was on its way


@dataclass(eq=False)
class Arrival:
    """A tensor on its way back: readable after `ready`, its memory belongs to `stream`."""

    tensor: torch.Tensor
    ready: torch.cuda.Event | None
    stream: torch.cuda.Stream | None


class Channel:
    """One device's streams out and in. On a device without streams everything happens at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = device.type == "cuda"
        self._leaving: deque[Transfer] = deque()
        if self._streams:
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, source: torch.Tensor, buffer: Buffer) -> Transfer:
        """Begin the copy to the host. The source is kept until at most IN_FLIGHT others have followed."""
        like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
        transfer = Transfer(source, source._version, like, buffer, self._current())
        target = view_of(buffer.memory, source)
        if transfer.stream is None:
            target.copy_(source)
        else:
            self._out.wait_event(transfer.stream.record_event())
            if buffer.free_from is not None:
                self._out.wait_event(buffer.free_from)
            with torch.cuda.stream(self._out):
                target.copy_(source, non_blocking=True)
            transfer.sent = self._out.record_event()
        self._leaving.append(transfer)
        while len(self._leaving) > IN_FLIGHT:
            self.release_source(self._leaving[0])
        return transfer

    def release_source(self, transfer: Transfer) -> None:
        """Let go of the source; whatever is issued after this on its stream comes after the copy."""
        if transfer.source is None:
            return
        self._leaving.remove(transfer)
        if transfer.stream is not None and transfer.sent is not None:
            transfer.stream.wait_event(transfer.sent)
            transfer.spoilt = transfer.source._version != transfer.version
        transfer.source = None

    def fetch(self, transfer: Transfer) -> Arrival:
        """Begin the copy back, after all that is issued on the current stream so far."""
        stream, like = self._current(), transfer.like
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)
        source = view_of(transfer.buffer.memory, like)
        if stream is None:
            tensor.copy_(source)
            return Arrival(tensor, None, None)
        assert transfer.sent is not None
        self._in.wait_event(stream.record_event())
        self._in.wait_event(transfer.sent)
        with torch.cuda.stream(self._in):
            tensor.copy_(source, non_blocking=True)
        ready = transfer.buffer.free_from = self._in.record_event()
        return Arrival(tensor, ready, stream)

    def receive(self, arrival: Arrival) -> torch.Tensor:
        """The tensor, readable by what is issued on the current stream from now on."""
        stream = self._current()
        if stream is not None and arrival.ready is not None:
            stream.wait_event(arrival.ready)
            if stream != arrival.stream:
                arrival.tensor.record_stream(stream)
        return arrival.tensor

    def drop(self, arrival: Arrival) -> None:
        """Nobody wants it: its memory must not be used again before the copy has ended."""
        if arrival.stream is not None and arrival.ready is not None:
            arrival.stream.wait_event(arrival.ready)

    def _current(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self._streams else None
