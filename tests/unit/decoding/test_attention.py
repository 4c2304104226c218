"""Attention in parts of the queries: how many at once, and the result of one call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from wanshim.core.decoding.operators import attention_kernel
from wanshim.core.decoding.operators.attention_kernel import attend_in_parts, rows_at_once, stored_values


@pytest.mark.parametrize(
    ("frames", "tokens", "rows"),
    [
        (21, 88 * 160, 88 * 160),  # a Wan video of 720p: one call, as the framework makes it
        (1, 160 * 144, 160 * 144),
        (1, 256 * 256, 8192),  # a picture of 2048x2048
        (4, 256 * 256, 2048),
        (1, 2**24, 128),
    ],
)
def test_queries_are_taken_at_once_unless_one_frame_has_too_many_scores(frames: int, tokens: int, rows: int) -> None:
    assert rows_at_once(frames, tokens, tokens) == rows
    if rows < tokens:
        assert rows == 128 or 2 * 2 * frames * rows * tokens <= 2**31  # 2 GiB of scores and weights, 16 bits each


def test_framework_s_own_attention_stores_all_scores_and_weights_at_once() -> None:
    tokens = 256 * 256
    assert 2 * stored_values(1, tokens, tokens, 384, in_parts=False) == 16 * 2**30  # as measured: diffusers, 16.5 GiB
    assert 2 * stored_values(1, tokens, tokens, 384) == 2 * 2**30
    assert stored_values(1, tokens, tokens, 256) == 0


class OnCuda(torch.Tensor):
    """Says that it is on a GPU: where the scores are stored does not change which are computed at once."""

    is_cuda = True  # type: ignore[assignment]


def test_parts_give_the_result_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "_MOST_SCORES", 2 * 300 * 130)
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 1, 300, 384).unbind(0)
    calls: list[int] = []
    one = F.scaled_dot_product_attention

    def noted(part: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        calls.append(part.shape[2])
        return one(part.as_subclass(torch.Tensor), *others)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    found = attend_in_parts(queries.as_subclass(OnCuda), keys, values).as_subclass(torch.Tensor)
    assert calls == [128, 128, 44]
    torch.testing.assert_close(found, one(queries, keys, values))
    attend_in_parts(queries, keys, values)  # on the CPU no scores are stored
    assert calls[3:] == [300]
