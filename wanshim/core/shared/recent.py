"""A dict of what was asked for lately: a server with free sizes asks for new ones as long as it runs."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """Keeps the `limit` entries that were set or read last."""

    def __init__(self, limit: int = 4096) -> None:
        super().__init__()
        self._limit = limit

    def __getitem__(self, key: K) -> V:
        value = super().__getitem__(key)
        self.move_to_end(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._limit:
            del self[next(iter(self))]
