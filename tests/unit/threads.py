"""Threads that stand for ranks or callers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned or raised, each in a thread of its own."""
    ends: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            ends[place] = calls[place]()
        except Exception as error:
            ends[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends
