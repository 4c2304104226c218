"""What a device waited for, and how many workers would have spared it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from wanshim.core.training import sample_waits
from wanshim.core.training.sample_waits import SampleWaits

CPU = torch.device("cpu")


class Clock:
    """Stands for time, which passes where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(sample_waits.time, "perf_counter", lambda: self.now)

    def samples(self, count: int, seconds: float) -> Iterator[int]:
        for number in range(count):
            self.now += seconds
            yield number


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def run(waits: SampleWaits, clock: Clock, *, load: float, step: float, epochs: int = 2, count: int = 11) -> None:
    for _ in range(epochs):
        found = []
        for sample in waits.around(lambda: clock.samples(count, load)):
            found.append(sample)
            clock.now += step
        assert found == list(range(count))


def test_each_wait_but_those_for_an_epochs_first_two_samples_counts(clock: Clock) -> None:
    waits = SampleWaits(CPU)
    run(waits, clock, load=3.0, step=1.0)
    assert waits.waited == 2 * 9 * 3.0
    assert waits.seconds == 2 * 9 * 4.0


@pytest.mark.parametrize(
    ("load", "step", "workers", "needed"),
    [
        (3.0, 1.0, 1, 4),
        (3.0, 1.0, 2, 8),
        (3.0, 1.0, 0, 3),
        (0.6, 1.0, 1, 2),
        (1.0, 0.0, 1, 100),
        (0.09, 1.0, 1, None),
        (0.4, 0.1, 1, None),
    ],
    ids=["one", "two", "none", "a little", "nothing else", "hardly", "short"],
)
def test_workers_that_would_be_in_time(
    load: float, step: float, workers: int, needed: int | None, clock: Clock
) -> None:
    """Each of `workers` loads one sample in the time of as many steps."""
    waits = SampleWaits(CPU)
    run(waits, clock, load=load, step=step)
    assert waits.workers_in_time(workers) == needed


class Event:
    """Stands for a GPU's, which the machine does not have: reached when the GPU has computed what came before it."""

    busy_until, reached = 0.0, 0.0  # of the GPU; how far it is known to be
    clock: Clock

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = max(self.clock.now, Event.busy_until)

    def query(self) -> bool:
        return self.at <= Event.reached

    def elapsed_time(self, other: Event) -> float:
        assert other.query()
        return (other.at - self.at) * 1000


def test_wait_of_a_gpu_begins_when_it_has_computed_its_step(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(Event, "clock", clock, raising=False)
    monkeypatch.setattr(Event, "busy_until", 0.0)
    monkeypatch.setattr(Event, "reached", 0.0)
    waits = SampleWaits(torch.device("cuda", 0))
    for _ in waits.around(lambda: clock.samples(11, 3.0)):
        Event.busy_until = clock.now + 2.0  # a step is given to it at once, and takes two seconds
        Event.reached = clock.now
    assert waits.waited == pytest.approx(8 * 1.0), "the last one is not known yet"
    assert waits.seconds == 9 * 3.0
    waits.waited = 20.0
    assert waits.workers_in_time(0) == 4, "loading by itself takes all 27 s, of which the GPU computes in 7"
