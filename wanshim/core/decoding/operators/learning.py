"""Learning spread over calls: no call is much slower for what later ones gain from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

SHARE = 0.1


class NotYet(Exception):
    """Learning has had its share of the time: what is not known waits for a later call."""


class Learning:
    """The time that calls took, and what share of it may go into learning.

    Args:
        share: of the time of all calls so far, the present one included.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._worked = self._learned = 0.0  # seconds
        self._call: float | None = None
        self._lesson: float | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call that may learn."""
        self._call = perf_counter()
        try:
            yield
        finally:
            self._worked += perf_counter() - self._call
            self._call = None

    @contextmanager
    def lesson(self) -> Iterator[None]:
        """A context in which work counts as learning; it may be nested."""
        if self._lesson is not None:
            yield
            return
        self._lesson = perf_counter()
        try:
            yield
        finally:
            self._learned += perf_counter() - self._lesson
            self._lesson = None

    @property
    def is_due(self) -> bool:
        """Is there time left for learning?"""
        now = perf_counter()
        learned = self._learned + (0.0 if self._lesson is None else now - self._lesson)
        worked = self._worked + (0.0 if self._call is None else now - self._call)
        return learned <= self._share * (worked - learned)
