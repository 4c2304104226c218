"""When each stage worked on what: device times for a picture of the schedule."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from wanshim.core.pipeline.stages import Place


@dataclass(frozen=True)
class Span:
    """`what` ("forward", "backward", "tail") of micro-batch `number` on `stage`; seconds since the trace began."""

    what: str
    stage: int
    number: int
    begin: float
    end: float


class Trace:
    """Begins on idle devices; `spans()` synchronises."""

    def __init__(self, places: list[Place]) -> None:
        self._open: dict[tuple[str, int, int], torch.cuda.Event | float] = {}
        self._closed: list[tuple[tuple[str, int, int], Place, torch.cuda.Event | float, torch.cuda.Event | float]] = []
        for place in places:
            if place.stream is not None:
                torch.cuda.synchronize(place.device)
        self._start = time.perf_counter()
        self._zero = {place.device: self._now(place) for place in places}

    def begin(self, what: str, stage: int, number: int, place: Place) -> None:
        self._open[what, stage, number] = self._now(place)

    def end(self, what: str, stage: int, number: int, place: Place) -> None:
        begun = self._open.pop((what, stage, number), None)
        if begun is not None:
            self._closed.append(((what, stage, number), place, begun, self._now(place)))

    def spans(self) -> list[Span]:
        for device in {place.device for _, place, _, _ in self._closed if place.stream is not None}:
            torch.cuda.synchronize(device)
        found = [
            Span(*key, self._seconds(place, begun), self._seconds(place, ended))
            for key, place, begun, ended in self._closed
        ]
        return sorted(found, key=lambda span: span.begin)

    def _now(self, place: Place) -> torch.cuda.Event | float:
        if place.stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(place.stream)
        return event

    def _seconds(self, place: Place, moment: torch.cuda.Event | float) -> float:
        if isinstance(moment, float):
            return moment - self._start
        zero = self._zero[place.device]
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
