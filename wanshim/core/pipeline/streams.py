"""The streams of a split's stages, and the copies between them.

PyTorch's own copy between devices makes each device's current stream wait for the other. Between two busy
stages that is a barrier; here it happens on two streams that carry nothing else.
"""

from __future__ import annotations

from collections import deque

import torch

# How many blocks a host thread may be ahead of its device. Deep enough to keep the device busy, and far
# from filling the launch queue, where one thread's launch would block those of all others on that device.
AHEAD = 2
URGENT = -1  # stream priority


class StageStream:
    """A device and one stream of it. On a device without streams, work is in order as it is issued."""

    def __init__(self, device: torch.device, *, own_stream: bool = False) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self._issued: deque[torch.cuda.Event] = deque()
        if device.type == "cuda":
            default = torch.cuda.default_stream(device)
            self.stream = torch.cuda.Stream(device, priority=URGENT) if own_stream else default

    def enter(self) -> None:
        """Issue what follows in this thread on this stream."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event behind everything issued here so far."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Begin what is issued here from now on after the event."""
        if event is not None and self.stream is not None:
            self.stream.wait_event(event)

    def limit_run_ahead(self) -> None:
        """Hold this thread back while it is more than AHEAD calls of `limit_run_ahead` ahead of the device."""
        if self.stream is None:
            return
        event = torch.cuda.Event(blocking=True)  # sleep, do not spin: other threads need the core
        event.record(self.stream)
        self._issued.append(event)
        while len(self._issued) > AHEAD:
            self._issued.popleft().synchronize()


class StageLink:
    """Copies from one stage's stream to another's, through a stream of its own at either end."""

    def __init__(self, source: StageStream, target: StageStream) -> None:
        self.source = source
        self.target = target
        self._crosses = source.device != target.device and source.stream is not None
        if self._crosses:
            self._out = torch.cuda.Stream(source.device, priority=URGENT)
            self._in = torch.cuda.Stream(target.device, priority=URGENT)

    def copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The tensor at the target, cut from autograd, and the event from which on it may be read there."""
        ready = self.source.mark()
        if self._crosses:
            return self._copy(tensor, ready)
        arrived = tensor.detach()
        if self.target.stream is not None and self.target.stream != self.source.stream:
            arrived.record_stream(self.target.stream)
        return arrived, ready

    def _copy(self, tensor: torch.Tensor, ready: torch.cuda.Event | None) -> tuple[torch.Tensor, torch.cuda.Event]:
        here, there = self._out, self._in
        if ready is not None:
            here.wait_event(ready)
        with torch.cuda.stream(here), torch.cuda.stream(there):
            arrived = tensor.detach().to(self.target.device, non_blocking=True)
        tensor.record_stream(here)
        assert self.target.stream is not None
        arrived.record_stream(self.target.stream)
        return arrived, there.record_event()
