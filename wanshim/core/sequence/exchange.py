"""All-to-all between tokens and heads around self-attention, in autograd, started early and awaited late.

Method: DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509), with uneven tokens and heads. Shapes: b batch, s all
tokens, n this rank's tokens, h all heads, m this rank's heads, d head dim.

A projection's output (b, n, h*d) starts on its way as soon as it exists and arrives as (b, s, m*d), stored token first,
so that what each rank sends lands where it belongs. `start` is a node whose output is filled later; `arrive` is a node
in place of that output, created where it is first read. Backward meets them in the opposite order: `arrive` starts the
gradient's way back, `start` awaits it. Autograd runs later nodes first, so that all gradients that are ready have
started before the first is awaited.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .group import InFlight, SequenceGroup
from .plan import SequencePlan, spans


class Passage:
    """One tensor's way from tokens to heads or, for `to_heads=False`, back; and its gradient's the other way.

    Args:
        late: the size of what its elements are until it is awaited, however fast it comes: waves, for a block might
            not tell one constant from another. None: they are whatever they are by then.
    """

    def __init__(self, group: SequenceGroup, plan: SequencePlan, *, to_heads: bool, late: float | None = None) -> None:
        self._group, self._plan, self._to_heads, self._late = group, plan, to_heads, late
        self._pending: InFlight | None = None
        self._behind: tuple[torch.Tensor, torch.Tensor] | None = None  # of a late one: its place, and what comes there
        self._gradient: torch.Tensor | None = None

    def start(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor of the other layout, to be read after `arrive`."""
        return _Start.apply(x, self)

    def arrive(self, x: torch.Tensor) -> None:
        """From now on `x`, which `start` returned, can be read; its history grows in place."""
        if torch.is_grad_enabled() and x.requires_grad:
            _Arrive.apply(x, self)
        else:
            self._await()

    def _move(self, x: torch.Tensor, *, to_heads: bool) -> torch.Tensor:
        move = start_to_heads if to_heads else start_to_tokens
        out, self._pending = move(self._group, self._plan, x)
        if self._late is None:
            return out
        waves = torch.arange(out.numel(), device=out.device, dtype=torch.float32).sin().mul(self._late)
        place = torch.empty_like(out).copy_(waves.view(out.shape))
        self._behind = place, out
        return place

    def _await(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self._behind is not None:
            place, out = self._behind
            place.copy_(out)
            self._behind = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passage: Passage) -> torch.Tensor:
        ctx.passage = passage
        return passage._move(x, to_heads=passage._to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        passage = ctx.passage
        gradient, passage._gradient = passage._gradient, None
        passage._await()
        return gradient, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passage: Passage) -> torch.Tensor:
        ctx.passage = passage
        ctx.mark_dirty(x)
        passage._await()
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        passage = ctx.passage
        passage._gradient = passage._move(gradient, to_heads=not passage._to_heads)
        return gradient, None  # keeps the shape that autograd expects; `_Start` has the one on its way


def start_to_heads(group: SequenceGroup, plan: SequencePlan, x: torch.Tensor) -> tuple[torch.Tensor, InFlight]:
    """(b, n, h*d) to (b, s, m*d): one copy of what leaves, none of what comes."""
    heads = spans(plan.heads)
    by_head = x.unflatten(2, (sum(plan.heads), -1))  # (b, n, h, d)
    out = _token_first(x, sum(plan.tokens), plan.heads[group.rank] * by_head.size(3))
    rows = list(out.transpose(0, 1).split(list(plan.tokens)))
    sends = [
        None if rank == group.rank else by_head[:, :, span].transpose(0, 1).contiguous()
        for rank, span in enumerate(heads)
    ]
    mine = by_head[:, :, heads[group.rank]].transpose(0, 1)  # (n, b, m, d)
    rows[group.rank].view(mine.shape).copy_(mine)
    return out, group.exchange(sends, [None if send is None else row for send, row in zip(sends, rows, strict=True)])


def start_to_tokens(group: SequenceGroup, plan: SequencePlan, x: torch.Tensor) -> tuple[torch.Tensor, InFlight]:
    """(b, s, m*d) to (b, n, h*d): no copy of what leaves where `x` is stored token first, one of what comes."""
    heads = spans(plan.heads)
    batch, count = x.size(0), plan.tokens[group.rank]
    dim = x.size(2) // plan.heads[group.rank]
    rows = x.transpose(0, 1).contiguous().split(list(plan.tokens))
    out = x.new_empty((batch, count, sum(plan.heads) * dim))
    by_head = out.unflatten(2, (-1, dim))
    sends = [None if rank == group.rank else row for rank, row in enumerate(rows)]
    receives = [
        None if rank == group.rank else x.new_empty((count, batch, heads_there, dim))
        for rank, heads_there in enumerate(plan.heads)
    ]
    by_head[:, :, heads[group.rank]] = rows[group.rank].view(count, batch, -1, dim).transpose(0, 1)

    def landed() -> None:
        for span, piece in zip(heads, receives, strict=True):
            if piece is not None:
                by_head[:, :, span] = piece.transpose(0, 1)

    return out, group.exchange(sends, receives, landed)


def own_heads(group: SequenceGroup, plan: SequencePlan, x: torch.Tensor) -> torch.Tensor:
    """(b, t, h*d) of tokens that every rank has to (b, t, m*d)."""
    return x.unflatten(2, (sum(plan.heads), -1))[:, :, spans(plan.heads)[group.rank]].flatten(2)


def gather_heads(group: SequenceGroup, plan: SequencePlan, x: torch.Tensor) -> torch.Tensor:
    """(b, t, m*d) of the same tokens on every rank to (b, t, h*d)."""
    mine = x.unflatten(2, (plan.heads[group.rank], -1)).movedim(2, 0).contiguous()
    return group.gather(mine, plan.heads).movedim(0, 2).flatten(2)


def _token_first(like: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """An empty (b, count, width) whose memory lies token after token; not a view, for `_Arrive` works in place."""
    batch = like.size(0)
    return like.new_empty_strided((batch, count, width), (width, batch * width, 1))


class Shard(torch.autograd.Function):
    """This rank's part of a tensor that all ranks hold, a view; backward gathers the parts' gradients, which come
    times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: SequenceGroup, counts: tuple[int, ...]) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.counts = dim, group, counts
        return shard(x, dim, group, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.group.watch.at("gradient of what the first block receives")
        mine = (gradient / ctx.group.size).movedim(ctx.dim, 0).contiguous()
        return ctx.group.gather(mine, ctx.counts).movedim(0, ctx.dim), None, None, None


def shard(x: torch.Tensor, dim: int, group: SequenceGroup, counts: tuple[int, ...]) -> torch.Tensor:
    span = spans(counts)[group.rank]
    return x.narrow(dim, span.start, span.stop - span.start)


class Share(torch.autograd.Function):
    """A tensor that every rank uses whole; backward averages the gradients, which come times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.group.watch.at("gradient of what all blocks share")
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
        ctx.group.sum(total).wait()
        return total.div_(ctx.group.size).to(gradient.dtype), None
