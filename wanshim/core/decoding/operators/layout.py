"""Memory layouts, the wider dtype of sums, and the pure permutations within decoder and encoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from wanshim.core.decoding.model.graph import Shortcut


def dense(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """An empty [B, C, T, H, W] whose memory is [B, T, H, W, C], strides canonical even where a size is 1."""
    b, c, t, h, w = shape
    return torch.empty((b, t, h, w, c), dtype=like.dtype, device=like.device).permute(0, 4, 1, 2, 3)


def used_strides(x: torch.Tensor) -> tuple[int, ...]:
    """The strides, 0 of a dim of one, where none is used.

    Triton compiles a kernel for each width of an integer (32 or 64 bits) and for what it is divisible by. A stride that
    is not used would make a new size, or a longer video, compile kernels that differ in nothing.
    """
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride()))


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in fp32, or fp64 where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def frames_last(x: torch.Tensor) -> torch.Tensor:
    """[B, C, T, H, W] to [B * T, C, H, W], channels last in memory if `x` is."""
    b, c, t, h, w = x.shape
    return x.permute(0, 2, 3, 4, 1).reshape(b * t, h, w, c).permute(0, 3, 1, 2)


def frames_apart(x: torch.Tensor, batch: int) -> torch.Tensor:
    """[B * T, C, H, W] to [B, C, T, H, W], channels last in memory."""
    x = x.permute(0, 2, 3, 1)
    return x.reshape(batch, -1, *x.shape[1:]).permute(0, 4, 1, 2, 3)


def interleave(x: torch.Tensor) -> torch.Tensor:
    """[B, 2C, T, H, W] to [B, C, 2T, H, W]: the two halves of the channels are the even and the odd frames."""
    b, c, t, h, w = x.shape
    x = x.reshape(b, 2, c // 2, t, h, w)
    return torch.stack((x[:, 0], x[:, 1]), 3).reshape(b, c // 2, t * 2, h, w)


def duplicate(dup: Shortcut, x: torch.Tensor, first: bool) -> torch.Tensor:
    """The 2.2 shortcut of a chunk; the video's first frame gives one frame, each later one `factor_t`."""
    b, _, t, h, w = x.shape
    factor_t, factor_s = dup.factor_t, dup.factor_s
    x = x.repeat_interleave(dup.group, dim=1)
    x = x.view(b, dup.out_channels, factor_t, factor_s, factor_s, t, h, w)
    x = x.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(b, dup.out_channels, t * factor_t, h * factor_s, w * factor_s)
    return x[:, :, factor_t - 1 :] if first else x


def folded_average(average: Shortcut, x: torch.Tensor) -> torch.Tensor:
    """The 2.2 shortcut of an encoder's chunk, channels last; frames that lack partners before them get zeros."""
    factor_t, factor_s = average.factor_t, average.factor_s
    x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % factor_t, 0))
    b, c, t, h, w = x.shape
    x = x.view(b, c, t // factor_t, factor_t, h // factor_s, factor_s, w // factor_s, factor_s)
    x = x.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(*(x.shape[i] for i in (0, 2, 4, 6)), -1, average.group)
    return x.mean(-1).permute(0, 4, 1, 2, 3)
