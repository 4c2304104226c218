"""Who answers the network's requests: one chunk after the other, or many chunks in lockstep.

`History` keeps, for every causal convolution, the last frames of its input. `run_in_order` is a causal run: chunk
after chunk, each completing its windows from the history (and, sharded in space, from its neighbours). `lockstep`
advances many chunks of a rank side by side, layer by layer: what a split in time needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from wanshim.core.decoding.operators.window import Tokens, Window

from .network import Chunk, Request


class Answer(Protocol):
    """Answers a request of the network; nothing follows the `last` chunk, so nothing is kept of it."""

    def __call__(self, request: Request, *, last: bool) -> torch.Tensor | None: ...


class History:
    """The past of every causal convolution, by name. Zeros at the start of a video."""

    def __init__(self) -> None:
        self._tails: dict[str, torch.Tensor] = {}

    def complete(self, window: Window, *, last: bool) -> None:
        """Fill the window's past and, if another chunk follows, remember its tail."""
        if not window.conv.history:
            return
        before = self._tails.pop(window.conv.name, None)
        if before is None:
            window.past().zero_()
        else:
            window.past().copy_(before)
        del before
        if not last:
            self._tails[window.conv.name] = window.tail().clone()

    def answer(self, request: Request, *, last: bool) -> torch.Tensor | None:
        """The answer of a rank that has all rows and columns."""
        if isinstance(request, Tokens):
            return request.data
        self.complete(request, last=last)
        return None


def drive(chunk: Chunk, answer: Callable[[Request], torch.Tensor | None]) -> torch.Tensor:
    """Run one chunk to its end."""
    reply: torch.Tensor | None = None
    try:
        while True:
            request = chunk.send(reply)
            reply = answer(request)
            del request
    except StopIteration as end:
        value = end.value
        assert isinstance(value, torch.Tensor)
        return value
    finally:
        chunk.close()


def run_in_order(
    steps: Sequence[tuple[int, int]], chunk: Callable[[int, int], Chunk], answer: Answer
) -> Iterator[torch.Tensor]:
    """Compute one chunk after the other: those of the latent frames of each step."""
    for start, stop in steps:
        yield drive(chunk(start, stop), partial(answer, last=stop == steps[-1][1]))


def run_in_lockstep(chunks: list[Chunk], complete: Callable[[list[Window]], None]) -> list[torch.Tensor]:
    """Advance all chunks from request to request together; `complete` sees the windows of one layer at once."""
    replies: list[torch.Tensor | None] = [None] * len(chunks)
    results: list[torch.Tensor] = []
    while not results:
        requests: list[Request] = []
        for i, chunk in enumerate(chunks):
            try:
                requests.append(chunk.send(replies[i]))
            except StopIteration as end:
                results.append(end.value)
            replies[i] = None
        windows = [request for request in requests if isinstance(request, Window)]
        replies = [request.data if isinstance(request, Tokens) else None for request in requests]
        del requests
        if windows:
            complete(windows)
        del windows
    return results
