"""A series that keeps its shape in bounded memory, and its drawing in a few thousand points."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import compress

MOST_KEPT = 400_000


class Curve:
    """Columns of doubles over a common, growing x. When full, every second point goes. A missing value is
    kept as NaN and given out as None."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self._data = {name: array("d") for name in ("x", *columns)}
        self._stride = 1
        self._seen = 0

    def __len__(self) -> int:
        return len(self._data["x"])

    @property
    def last_x(self) -> float:
        """The x of the newest point kept, -1.0 without any."""
        return self._data["x"][-1] if len(self) else -1.0

    def add(self, x: float, **values: float | None) -> None:
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        self._data["x"].append(x)
        for name in self.columns:
            value = values.get(name)
            self._data[name].append(float("nan") if value is None else value)
        if len(self) >= MOST_KEPT:
            self._halve()

    def cut(self, end: float) -> None:
        """Forget the points with x > `end`."""
        kept = bisect_right(self._data["x"], end)
        for column in self._data.values():
            del column[kept:]

    def _halve(self) -> None:
        self._stride *= 2
        for name, column in self._data.items():
            self._data[name] = column[::2]

    def thinned(
        self, most: int, after: float = -1.0, columns: tuple[str, ...] | None = None
    ) -> dict[str, list[float | None]]:
        """At most about `most` points with x > `after`: of each bucket the point of the first column's least
        and greatest value, so that a spike stays.

        Args:
            columns: those to give beside x; all by default.
        """
        begin = bisect_right(self._data["x"], after) if after >= 0 else 0
        chosen = self._choose(begin, most)
        names = ("x", *(self.columns if columns is None else columns))
        return {name: [_plain(self._data[name][i]) for i in chosen] for name in names}

    def _choose(self, begin: int, most: int) -> list[int]:
        count = len(self) - begin
        if count <= most:
            return list(range(begin, len(self)))
        column = self._data[self.columns[0]]
        size = count / (most / 2)
        chosen: list[int] = []
        for bucket in range(most // 2):
            inside = range(begin + int(bucket * size), min(len(self), begin + int((bucket + 1) * size)))
            real = list(compress(inside, (column[i] == column[i] for i in inside))) or list(inside[:1])
            if real:
                chosen += sorted({min(real, key=column.__getitem__), max(real, key=column.__getitem__)})
        if chosen and chosen[-1] != len(self) - 1:
            chosen.append(len(self) - 1)
        return chosen


def _plain(value: float) -> float | None:
    return value if value == value else None
