"""When each stage worked on what: device times for a picture of the schedule."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeAlias

import torch

from wanshim.core.pipeline.streams import StageStream

Moment: TypeAlias = "torch.cuda.Event | float"


@dataclass(frozen=True)
class Span:
    """`what` ("forward", "backward", "tail") of micro-batch `number` on `stage`; seconds since the timeline began."""

    what: str
    stage: int
    number: int
    begin: float
    end: float


class Timeline:
    """Begins on idle devices; `spans()` synchronises."""

    def __init__(self, streams: list[StageStream]) -> None:
        self._open: dict[tuple[str, int, int], Moment] = {}
        self._closed: list[tuple[tuple[str, int, int], StageStream, Moment, Moment]] = []
        for stream in streams:
            if stream.stream is not None:
                torch.cuda.synchronize(stream.device)
        self._start = time.perf_counter()
        self._zero = {stream.device: self._now(stream) for stream in streams}

    def trace(self, begins: bool, what: str, stage: int, number: int, stream: StageStream) -> None:
        """The `trace` of a pipeline's stages."""
        if begins:
            self._open[what, stage, number] = self._now(stream)
        elif (begun := self._open.pop((what, stage, number), None)) is not None:
            self._closed.append(((what, stage, number), stream, begun, self._now(stream)))

    def spans(self) -> list[Span]:
        for device in {stream.device for _, stream, _, _ in self._closed if stream.stream is not None}:
            torch.cuda.synchronize(device)
        found = [
            Span(*key, self._seconds(stream, begun), self._seconds(stream, ended))
            for key, stream, begun, ended in self._closed
        ]
        return sorted(found, key=lambda span: span.begin)

    def _now(self, stream: StageStream) -> Moment:
        if stream.stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream.stream)
        return event

    def _seconds(self, stream: StageStream, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment - self._start
        zero = self._zero[stream.device]
        assert not isinstance(zero, float)
        return float(zero.elapsed_time(moment)) / 1e3


def draw(spans: list[Span], stages: int, width: int = 100) -> str:
    """One line a stage: `0123` forwards, `abcd` backwards of micro-batches 0, 1, 2, 3, `.` idle."""
    finish = max(span.end for span in spans)
    rows = [["."] * width for _ in range(stages)]
    for span in spans:
        if span.stage >= stages or span.what == "tail":
            continue
        letter = str(span.number % 10) if span.what == "forward" else chr(ord("a") + span.number % 26)
        for column in range(int(span.begin / finish * width), max(int(span.end / finish * width), 0)):
            rows[span.stage][column] = letter
    return "\n".join(f"stage {i} |{''.join(row)}|" for i, row in enumerate(rows)) + f" {finish:.2f} s"
