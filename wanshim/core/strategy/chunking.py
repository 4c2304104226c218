"""Run part of a block over its tokens in chunks, so that its temporaries are those of one chunk.

What works on each token alone (rotary embedding, RMS norm) gives the same bits in chunks, forward and backward. A
matrix product over fewer rows may be computed by another kernel, and a gradient of a weight is then a sum over chunks:
the feed-forward network is equal up to the order of summation. Its sums are kept in fp32 until the last chunk.

Method: recomputation per chunk, as gradient checkpointing (Chen et al. 2016, arXiv:1604.06174) within a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from wanshim.core.shared.autocast import autocast_of_caller
from wanshim.errors import PlacementInvalid

# What is computed of tokens [start, stop): takes those tokens and their bounds.
Compute = Callable[[torch.Tensor, int, int], torch.Tensor]


def in_chunks(
    compute: Compute, x: torch.Tensor, tokens: int, trainable: tuple[torch.Tensor, ...] = (), *, linear: bool = False
) -> torch.Tensor:
    """`compute` over dimension 1 of `x`, `tokens` at a time; only `x` is kept for backward, or nothing.

    Args:
        compute: (x[:, start:stop], start, stop) -> (batch, stop - start, ...); the result for a token depends on that
            token alone, and is the same when computed again.
        x: (batch, tokens, ...), any dtype.
        trainable: parameters that `compute` uses and that want a gradient.
        linear: `compute` is linear in `x` and gives its shape and dtype, so its gradient needs no `x`.
    """
    if x.shape[1] <= tokens:
        return compute(x, 0, x.shape[1])
    result: torch.Tensor = _InChunks.apply(compute, tokens, linear, x, *trainable)
    return result


def chunk_module(module: nn.Module, forward: Callable[..., Any], tokens: int) -> Callable[..., Any]:
    """A forward for `module` that runs `forward`, its own, in chunks of its one argument's tokens.

    Raises:
        PlacementInvalid: the module drops out at random, and would draw anew when it is computed again.
    """
    dropouts = [name for name, m in module.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    if dropouts:
        raise PlacementInvalid(
            f"{type(module).__name__} drops out at random in {', '.join(dropouts)}",
            expected="a module that computes the same again",
            topic="chunk_off",
        )

    def chunked(x: torch.Tensor) -> torch.Tensor:
        trainable = tuple(p for p in module.parameters() if p.requires_grad)
        return in_chunks(lambda part, start, stop: forward(part), x, tokens, trainable)

    return chunked


def chunk_rotary(rotate: Callable[..., torch.Tensor], tokens: int) -> Callable[..., torch.Tensor]:
    """`rotate(x, freqs, num_heads)` in chunks of tokens: `x` (batch, tokens, channels), `freqs` (tokens, 1, half)."""

    def chunked(x: torch.Tensor, freqs: torch.Tensor, num_heads: int) -> torch.Tensor:
        if freqs.shape[0] != x.shape[1]:  # not one frequency a token: leave it as it is
            return rotate(x, freqs, num_heads)
        return in_chunks(lambda part, start, stop: rotate(part, freqs[start:stop], num_heads), x, tokens, linear=True)

    return chunked


def _bounds(length: int, tokens: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, tokens):
        yield start, min(start + tokens, length)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Compute, tokens: int, linear: bool, x: torch.Tensor, *trainable: torch.Tensor
    ) -> torch.Tensor:
        ctx.compute, ctx.tokens, ctx.linear, ctx.autocast = compute, tokens, linear, autocast_of_caller()
        ctx.save_for_backward(*trainable, *(() if linear else (x,)))
        output: torch.Tensor | None = None
        for start, stop in _bounds(x.shape[1], tokens):
            piece = compute(x[:, start:stop], start, stop)
            if output is None:
                output = piece.new_empty((piece.shape[0], x.shape[1], *piece.shape[2:]))
            output[:, start:stop] = piece
            del piece
        assert output is not None
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        saved, (towards_x, *towards) = list(ctx.saved_tensors), ctx.needs_input_grad[3:]
        x = gradient if ctx.linear else saved.pop()  # of a linear map, any input has the same gradient
        wanted = [p for p, needed in zip(saved, towards, strict=True) if needed]
        result = torch.empty_like(x) if towards_x else None
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in wanted]
        for start, stop in _bounds(x.shape[1], ctx.tokens):
            part = x[:, start:stop].detach().requires_grad_(towards_x)
            with torch.enable_grad(), ctx.autocast():
                piece = ctx.compute(part, start, stop)
            found = list(torch.autograd.grad(piece, [part, *wanted] if towards_x else wanted, gradient[:, start:stop]))
            if result is not None:
                result[:, start:stop] = found.pop(0)
            for total, own in zip(sums, found, strict=True):
                total += own
        totals = iter([total.to(p.dtype) for total, p in zip(sums, wanted, strict=True)])
        return None, None, None, result, *(next(totals) if needed else None for needed in towards)
