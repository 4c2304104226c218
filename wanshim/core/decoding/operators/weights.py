"""The weights as the fast operators want them: channels last, in the dtype of the decode.

Where only the layout differs it is changed in the module itself, by reference: the Parameter stays the same object
with the same values, and `restore()` puts the old layout back. Only a weight of another dtype (fp32 weights under
autocast) or one that a framework swaps in per call is copied, for the length of one decode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from wanshim.core.decoding.model.graph import Conv, Graph

FEW = 16  # output channels
_Pair = tuple[torch.Tensor, "torch.Tensor | None"]


def widened(weight: torch.Tensor) -> torch.Tensor:
    """[C, I, 3, 3, 3] as [4 D, I, 3, 4, 4], channels last: with stride 2 in space it computes a square of 2 x 2 outputs
    at once.

    A convolution with 3 output channels takes cuDNN as long as one with 16. D is C, made even: cuDNN counts in eights.
    `squares_apart` undoes the rest.
    """
    channels, given = weight.shape[:2]
    wide = weight.new_zeros((2, 2, channels + channels % 2, given, 3, 4, 4))
    for row in (0, 1):
        for column in (0, 1):
            wide[row, column, :channels, :, :, row : row + 3, column : column + 3] = weight
    return wide.flatten(0, 2).contiguous(memory_format=torch.channels_last_3d)


def squares_apart(x: torch.Tensor, channels: int) -> torch.Tensor:
    """[B, 4 D, T, H, W], the outputs of a `widened` weight, as [B, channels, T, 2 H, 2 W], channels last."""
    b, _, t, h, w = x.shape
    x = x.permute(0, 2, 3, 4, 1).reshape(b, t, h, w, 2, 2, -1)[..., :channels]
    return x.permute(0, 1, 2, 4, 3, 5, 6).reshape(b, t, 2 * h, 2 * w, channels).permute(0, 4, 1, 2, 3)


def by_phase(weight: torch.Tensor) -> torch.Tensor:
    """[C, I, 3, 3] for a picture upsampled by two, as [4 C, I, 2, 2] for the picture itself, channels last.

    After nearest upsampling the three rows that an output reads lie on two rows of the small picture, and so do the
    columns: 4 products in place of 9. With one row and column of zeros around the small picture, output
    (2 i + a, 2 j + b) is what the channels from (2 a + b) C on have at (i + a, j + b).
    """
    wide = weight.to(torch.float32 if weight.element_size() < 4 else torch.float64)
    for dim in (2, 4):
        first, second, third = wide.unbind(dim)
        even, odd = (first, second + third), (first + second, third)
        wide = torch.stack([torch.stack(pair, dim) for pair in (even, odd)])
    _, _, channels, given, *size = wide.shape  # phases of columns, of rows
    phases = wide.transpose(0, 1).reshape(4 * channels, given, *size).to(weight.dtype)
    return phases.contiguous(memory_format=torch.channels_last)


class FastWeights:
    """Looks up (weight, bias) of a convolution, ready for the fast operators."""

    def __init__(self, graph: Graph, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._relaid: dict[Conv, tuple[int, ...]] = {}
        self._pairs: dict[Conv, _Pair] = {}
        self._made: dict[tuple[Conv, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor] = {}  # by what makes it
        self._graph = graph

    def __enter__(self) -> FastWeights:
        for conv in self._graph.convs():
            self._pairs[conv] = self._prepare(conv)
        return self

    def __exit__(self, *error: object) -> None:
        self._pairs.clear()
        self._made.clear()

    def of(self, conv: Conv) -> _Pair:
        return self._pairs[conv]

    def made(self, conv: Conv, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The result of `make` of the convolution's weight, made once in a decode."""
        if (conv, make) not in self._made:
            self._made[conv, make] = make(self._pairs[conv][0])
        return self._made[conv, make]

    def restore(self) -> None:
        """Put every weight back into the layout it was found in."""
        for conv, strides in self._relaid.items():
            weight = conv.module.weight
            if weight.stride() != strides:
                weight.data = torch.empty_strided(
                    weight.shape, strides, dtype=weight.dtype, device=weight.device
                ).copy_(weight.data)
        self._relaid.clear()

    def _prepare(self, conv: Conv) -> _Pair:
        module = conv.current()
        weight, bias = module.weight, module.bias
        layout = torch.channels_last_3d if weight.dim() == 5 else torch.channels_last
        if conv.resolve is None and weight.dtype == self.dtype:
            if not weight.is_contiguous(memory_format=layout):
                self._relaid.setdefault(conv, tuple(weight.stride()))
                weight.data = weight.data.contiguous(memory_format=layout)
            return weight.detach(), None if bias is None else bias.detach()
        cast = weight.detach().to(self.dtype).contiguous(memory_format=layout)
        return cast, None if bias is None else bias.detach().to(self.dtype)
