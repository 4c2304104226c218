"""CUDA streams without a GPU: what must have ended before a copy may begin, as streams and events say.

Copies happen at once, in the order of the program. What a test asks is the order that a GPU has to keep: a stream knows
the work that is `behind` it, an event hands that on to the stream that waits for it, and each copy notes what was
behind its stream when it was issued.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(eq=False)
class Event:
    behind: frozenset[str] = frozenset()

    def record(self, stream: Stream) -> None:
        self.behind = frozenset(stream.behind)

    def query(self) -> bool:
        """Whether the work before it has ended: nobody knows when."""
        return False


@dataclass(eq=False)
class Stream:
    name: str
    behind: set[str] = field(default_factory=set)

    def work(self, name: str) -> None:
        """Issue work."""
        self.behind.add(name)

    def record_event(self) -> Event:
        return Event(frozenset(self.behind))

    def wait_event(self, event: Event) -> None:
        self.behind |= event.behind

    def wait_stream(self, other: Stream) -> None:
        self.behind |= other.behind


@dataclass(frozen=True)
class Copy:
    """`waits`: the host waits for its end."""

    stream: str
    waits: bool
    behind: frozenset[str]


class Streams(TorchDispatchMode):
    """Stands in for the streams of `torch.cuda` while it is entered.

    `copies` are those issued so far; copy number `n` is work named `copy n`. `kept` says for which other stream a
    tensor's memory is kept (`Tensor.record_stream`).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.current = self.compute = Stream("compute")
        self.copies: list[Copy] = []
        self.kept: list[tuple[int, Stream]] = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: self.kept.append((t.data_ptr(), s)))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            waits = not (args[2] if len(args) > 2 else False)
            self.copies.append(Copy(self.current.name, waits, frozenset(self.current.behind)))
            self.current.work(f"copy {len(self.copies) - 1}")
        return func(*args, **kwargs or {})
