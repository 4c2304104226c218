"""What the decoder shows to its neighbours: the input of a convolution, and the keys of an attention.

The network (`network.py`) stops at each of these and asks for what it lacks: frames before its first, rows and
columns beyond its edge, the tokens of the other ranks. Who answers, and from where, is the only difference between the
modes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wanshim.core.decoding.model.graph import Conv


@dataclass(slots=True)
class Window:
    """The input of a convolution: own values, space for earlier frames and for the halo.

    `data` is [B, C, history + T, rows + H + rows, columns + W + columns]; `own()` is the [B, C, T, H, W] inside.
    Margins along `split` (3: rows, 4: columns) are for the neighbours, others hold zeros.
    """

    conv: Conv
    data: torch.Tensor
    history: int
    rows: int
    columns: int
    split: int | None = None

    @property
    def frames(self) -> int:
        return int(self.data.shape[2]) - self.history

    def own(self) -> torch.Tensor:
        height, width = self.data.shape[3] - 2 * self.rows, self.data.shape[4] - 2 * self.columns
        return (
            self.data.narrow(2, self.history, self.frames).narrow(3, self.rows, height).narrow(4, self.columns, width)
        )

    def past(self) -> torch.Tensor:
        """The frames before the first own one, neighbours' edges included, zeros around not."""
        return self._known(self.data.narrow(2, 0, self.history))

    def tail(self) -> torch.Tensor:
        """The last frames: what the next window of this convolution has as its past."""
        return self._known(self.data.narrow(2, self.data.shape[2] - self.history, self.history))

    def fresh(self) -> torch.Tensor:
        """The own frames, as `past()` has the earlier ones."""
        return self._known(self.data.narrow(2, self.history, self.frames))

    def _known(self, frames: torch.Tensor) -> torch.Tensor:
        for dim, margin in ((3, self.rows), (4, self.columns)):
            if margin and dim != self.split:
                frames = frames.narrow(dim, margin, frames.shape[dim] - 2 * margin)
        return frames

    def edge(self, dim: int, side: int) -> torch.Tensor:
        """The outermost own slab of the new frames on `side` (0: first, 1: last) of `dim`; a neighbour's halo."""
        fresh = self.data.narrow(2, self.history, self.frames)
        return fresh.narrow(dim, 1 if side == 0 else fresh.shape[dim] - 2, 1)

    def halo(self, dim: int, side: int) -> torch.Tensor:
        """Where the neighbour's edge on `side` of `dim` goes, new frames only."""
        fresh = self.data.narrow(2, self.history, self.frames)
        return fresh.narrow(dim, 0 if side == 0 else fresh.shape[dim] - 1, 1)


@dataclass(slots=True)
class Tokens:
    """Keys and values of one attention, [frames, 1, tokens, 2 * channels]; answered with those of every rank."""

    name: str
    data: torch.Tensor


@dataclass(slots=True)
class Pending:
    """A sum that the next operator takes: main + bias + skip. Taking it lets go of its parts."""

    main: torch.Tensor | None
    bias: torch.Tensor | None = None
    skip: torch.Tensor | None = None

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        assert self.main is not None, "a pending sum is taken once"
        parts = (self.main, self.bias, self.skip)
        self.main = self.bias = self.skip = None
        return parts
