"""Windows that the network shows to its neighbours: the input of a convolution, and the keys of an attention.

The network (`network.py`) stops at each of these and asks for what it lacks: frames before its first, rows and
columns beyond its edge, the tokens of the other ranks. Who answers, and from where, is the only difference between the
modes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from wanshim.core.decoding.model.graph import Conv

from .layout import dense
from .winograd import DeferredOutput


@dataclass(slots=True)
class Window:
    """The input of a convolution: own values, space for earlier frames and for the halo.

    `data` is [B, C, history + T, H + sum(rows), W + sum(columns)]; `own()` is the [B, C, T, H, W] inside. `rows` and
    `columns` are the margins before and after it: along `split` (3: rows, 4: columns) for the neighbours, else zeros.
    `history` is the convolution's, or 0 where the own frames begin with all that there is. With `small` the values are
    those before nearest upsampling by two, and the output is twice as high and wide as they are.
    """

    conv: Conv
    data: torch.Tensor
    history: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    split: int | None = None
    small: bool = False

    @property
    def frames(self) -> int:
        return int(self.data.shape[2]) - self.history

    def own(self) -> torch.Tensor:
        return _inside(_inside(self.data.narrow(2, self.history, self.frames), 3, self.rows), 4, self.columns)

    def shape(self) -> tuple[int, int, int, int, int]:
        """The shape of the own values."""
        b, c, t, h, w = self.data.shape
        return b, c, t - self.history, h - sum(self.rows), w - sum(self.columns)

    def past(self) -> torch.Tensor:
        """The frames before the first own one, neighbours' edges included, zeros around not."""
        return self._known(self.data.narrow(2, 0, self.history))

    def tail(self) -> torch.Tensor:
        """The last frames: what the next window of this convolution has as its past."""
        history = self.conv.history
        return self._known(self.data.narrow(2, self.data.shape[2] - history, history))

    def fresh(self) -> torch.Tensor:
        """The own frames, as `past()` has the earlier ones."""
        return self._known(self.data.narrow(2, self.history, self.frames))

    def _known(self, frames: torch.Tensor) -> torch.Tensor:
        for dim, margin in ((3, self.rows), (4, self.columns)):
            if dim != self.split:
                frames = _inside(frames, dim, margin)
        return frames

    def edge(self, dim: int, side: int) -> torch.Tensor:
        """The outermost own slab of the new frames on `side` (0: first, 1: last) of `dim`; a neighbour's halo."""
        fresh = self.data.narrow(2, self.history, self.frames)
        before, after = self.margins(dim)
        return fresh.narrow(dim, before if side == 0 else fresh.shape[dim] - after - 1, 1)

    def halo(self, dim: int, side: int) -> torch.Tensor:
        """The place for the neighbour's edge on `side` of `dim`, new frames only."""
        fresh = self.data.narrow(2, self.history, self.frames)
        return fresh.narrow(dim, 0 if side == 0 else fresh.shape[dim] - 1, 1)

    def margins(self, dim: int) -> tuple[int, int]:
        return self.rows if dim == 3 else self.columns

    def padding(self) -> tuple[int, int]:
        """The zeros that are still due on both sides of the rows and of the columns."""
        return self.conv.halo[0] - self.rows[0], self.conv.halo[0] - self.columns[0]


def _inside(x: torch.Tensor, dim: int, margins: tuple[int, int]) -> torch.Tensor:
    return x.narrow(dim, margins[0], x.shape[dim] - sum(margins)) if any(margins) else x


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of the own values, all of them but for one dimension."""

    dim: int
    start: int
    length: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x.narrow(self.dim, self.start, self.length)


class Ahead(Protocol):
    """Sends what other ranks wait for, while the rest of a window is computed."""

    def slabs(self, window: Window) -> list[Slab]:
        """The own values that go to other ranks."""

    def begin(self, window: Window) -> None:
        """Those values are there."""


@dataclass(slots=True)
class Tokens:
    """Keys and values of one attention, [frames, 1, tokens, 2 * channels]; answered with those of every rank."""

    name: str
    data: torch.Tensor


@dataclass(slots=True)
class Pending:
    """A sum that the next operator takes: main + bias + skip. Taking it lets go of its parts.

    With `by_phase` main is [B, 4 C, T, H + 1, W + 1], what a `weights.by_phase` weight gives for [B, C, T, 2 H, 2 W].
    With `strides` the sum lies so in memory, wherever main lies. A `shared` skip is read by others too.
    """

    main: torch.Tensor | DeferredOutput | None
    bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    by_phase: bool = False
    strides: tuple[int, ...] | None = None
    shared: bool = False

    def shape(self) -> tuple[int, int, int, int, int]:
        """The shape of the sum."""
        assert self.main is not None
        b, c, t, h, w = self.main.shape
        return (b, c // 4, t, 2 * h - 2, 2 * w - 2) if self.by_phase else (b, c, t, h, w)

    def like(self) -> torch.Tensor:
        """A tensor of the sum's dtype and device."""
        assert self.main is not None
        return self.main.x if isinstance(self.main, DeferredOutput) else self.main

    def place(self) -> torch.Tensor:
        """The place for the sum: main, if that has its shape; into the skip, if main is yet to be computed."""
        if isinstance(self.main, torch.Tensor) and not self.by_phase:
            return self.main
        if isinstance(self.main, DeferredOutput) and self.skip is not None and not self.shared:
            return self.skip
        return dense(self.shape(), self.like())

    def take(self) -> tuple[torch.Tensor | DeferredOutput, torch.Tensor | None, torch.Tensor | None]:
        assert self.main is not None, "a pending sum is taken once"
        parts = (self.main, self.bias, self.skip)
        self.main = self.bias = self.skip = None
        return parts
