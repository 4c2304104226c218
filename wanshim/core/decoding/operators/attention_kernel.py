"""Attention with one head of 384 channels, which torch's own fast kernels (256 at most) do not take.

What torch computes there instead stores the scores of all queries and keys: 16 GiB for a picture of 2048x2048. So it is
given some queries after the others where there are many; a row of scores does not depend on the other rows.

The kernel is the usual online softmax over blocks of keys, in fp32 (Dao et al., FlashAttention-2, 2023). A block of
Triton has a power of two of channels, so the head is taken as 256 and 128.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from wanshim.core.shared.kernel_launch import launch, takes_kernels
from wanshim.core.shared.optional_triton import tl, triton

_CHANNELS = (256, 128)
_QUERIES, _KEYS, _STAGES, _WARPS = 128, 32, 2, 8  # the fastest of seven combinations on an H200
_SHARED = 200 << 10  # bytes of shared memory that they take
_STORED_FROM = 257  # channels of a head
_MOST_SCORES = 2**29  # stored at once: 2 GiB of 16-bit scores and weights
_ROWS = 128  # the number of queries is a multiple of it, as tiles of matrix products have it


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of [N, 1, tokens, C] with one head; any number of tokens."""
    if not _usable(queries, keys, values):
        return attend_in_parts(queries, keys, values)
    n, _, count, channels = queries.shape
    out = queries.new_empty(queries.shape)
    scale = channels**-0.5 * math.log2(math.e)
    with torch.cuda.device_of(queries):
        launch(
            _attend, (triton.cdiv(count, _QUERIES), n), queries, keys, values, out, count, keys.shape[2], scale,
            *(x.stride(dim) for x in (queries, keys, values, out) for dim in (0, 2)),
            QUERIES=_QUERIES, KEYS=_KEYS, FIRST=_CHANNELS[0], SECOND=_CHANNELS[1], STAGES=_STAGES, num_warps=_WARPS,
        )  # fmt: skip
    return out


def attend_in_parts(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """torch's attention, of some queries after the others where it would store the scores of too many."""
    n, _, count, channels = queries.shape
    rows = rows_at_once(n, count, keys.shape[2]) if channels >= _STORED_FROM and takes_kernels(queries) else count
    if rows >= count:
        return F.scaled_dot_product_attention(queries, keys, values)
    out = queries.new_empty(queries.shape)
    for first in range(0, count, rows):
        part = slice(first, first + rows)
        out[:, :, part] = F.scaled_dot_product_attention(queries[:, :, part], keys, values)
    return out


def rows_at_once(frames: int, queries: int, keys: int) -> int:
    """The number of queries of each frame that are taken at once: all, unless one frame alone has more than
    `_MOST_SCORES`."""
    if queries * keys <= _MOST_SCORES:
        return queries
    return min(queries, max(_MOST_SCORES // (frames * keys) // _ROWS, 1) * _ROWS)


def stored_values(frames: int, queries: int, keys: int, channels: int, *, in_parts: bool = True) -> int:
    """The number of values that an attention stores at most beside its input and output: scores, and the weights made
    of them.

    Args:
        in_parts: by `attend_in_parts`; else by one call, as a framework makes it.
    """
    rows = rows_at_once(frames, queries, keys) if in_parts else queries
    return 2 * frames * rows * keys if channels >= _STORED_FROM else 0


def _usable(*tensors: torch.Tensor) -> bool:
    if triton is None or any(x.itemsize != 2 or x.stride(3) != 1 or not takes_kernels(x) for x in tensors):
        return False
    if tensors[0].shape[3] != sum(_CHANNELS):
        return False
    device = tensors[0].device
    return tensors[0].is_meta or torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _SHARED


if TYPE_CHECKING:  # Triton reads its functions as source; to a type checker their arguments mean nothing
    _attend: Any
if not TYPE_CHECKING and triton is not None:

    @triton.jit(do_not_specialize=["q_count", "k_count"])
    def _attend(
        Q, K, V, OUT, q_count, k_count, scale, qn, qt, kn, kt, vn, vt, on, ot,
        QUERIES: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        frame = tl.program_id(1).to(tl.int64)
        rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
        first, second = tl.arange(0, FIRST)[None, :], FIRST + tl.arange(0, SECOND)[None, :]
        mine = (rows < q_count)[:, None]
        query = Q + frame * qn + rows.to(tl.int64)[:, None] * qt
        q1 = tl.load(query + first, mask=mine, other=0.0)
        q2 = tl.load(query + second, mask=mine, other=0.0)
        sum1 = tl.zeros((QUERIES, FIRST), tl.float32)
        sum2 = tl.zeros((QUERIES, SECOND), tl.float32)
        largest = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        for start in tl.range(0, k_count, KEYS, num_stages=STAGES):
            tokens = start + tl.arange(0, KEYS)
            there = (tokens < k_count)[:, None]
            key = K + frame * kn + tokens.to(tl.int64)[:, None] * kt
            scores = tl.dot(q1, tl.trans(tl.load(key + first, mask=there, other=0.0)))
            scores = tl.dot(q2, tl.trans(tl.load(key + second, mask=there, other=0.0)), scores)
            scores = tl.where((tokens < k_count)[None, :], scores * scale, -1e30)
            larger = tl.maximum(largest, tl.max(scores, 1))
            shrink = tl.exp2(largest - larger)
            scores = tl.exp2(scores - larger[:, None])
            total = total * shrink + tl.sum(scores, 1)
            largest = larger
            value = V + frame * vn + tokens.to(tl.int64)[:, None] * vt
            weights = scores.to(Q.dtype.element_ty)
            sum1 = tl.dot(weights, tl.load(value + first, mask=there, other=0.0), sum1 * shrink[:, None])
            sum2 = tl.dot(weights, tl.load(value + second, mask=there, other=0.0), sum2 * shrink[:, None])
        out = OUT + frame * on + rows.to(tl.int64)[:, None] * ot
        tl.store(out + first, (sum1 / total[:, None]).to(OUT.dtype.element_ty), mask=mine)
        tl.store(out + second, (sum2 / total[:, None]).to(OUT.dtype.element_ty), mask=mine)
