"""The weights that compute four outputs at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from wanshim.core.decoding.operators import fused
from wanshim.core.decoding.operators.weights import by_phase, squares_apart, widened


@pytest.mark.parametrize("channels", [1, 3, 12])
@pytest.mark.parametrize("padding", [(0, 1, 1), (0, 0, 1)], ids=["whole picture", "rows of a neighbour"])
def test_squares_are_the_outputs_of_the_convolution(channels: int, padding: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 4, 8, 10).double(), torch.randn(channels, 5, 3, 3, 3).double()
    squares = F.conv3d(x, widened(weight), None, (1, 2, 2), padding)
    assert torch.allclose(squares_apart(squares, channels), F.conv3d(x, weight, None, 1, padding), atol=1e-12)


@pytest.mark.parametrize("rows", [0, 1], ids=["whole picture", "rows of a neighbour"])
def test_phases_of_the_small_picture_are_the_convolution_of_the_upsampled_one(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 4 + 2 * rows, 7).double(), torch.randn(3, 5, 3, 3).double()
    large = F.interpolate(x, scale_factor=2.0, mode="nearest-exact")
    expected = F.conv2d(large, weight, None, 1, 1)[:, :, 2 * rows : 8 + 2 * rows]
    phases = F.conv2d(x, by_phase(weight), None, 1, (1 - rows, 1))
    out = torch.empty_like(expected)[:, :, None]
    fused.sum_into(phases[:, :, None], None, None, out)
    assert torch.allclose(out[:, :, 0], expected, atol=1e-12)
