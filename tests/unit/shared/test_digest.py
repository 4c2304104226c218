"""The digest sees every bit and every position, whatever the strides; its cost is measured in `benchmarks/`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from wanshim.core.shared import digest as module
from wanshim.core.shared.digest import digest, digest_on_device, digest_weights, digests

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def latent(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(1))
    return (values * 10).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors_have_equal_digests_whatever_their_strides(dtype: torch.dtype) -> None:
    x = latent(dtype)
    last = x.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    assert last.stride() != x.stride()
    assert digest(last) == digest(x.clone()) == digest(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [8, 7])
def test_equal_tensors_have_equal_digests_wherever_they_begin(dtype: torch.dtype, size: int) -> None:
    x = torch.arange(size + 4).to(dtype)
    assert {digest(x[start : start + size].clone()) for start in range(4)} == {
        digest(x[start : start + size]) for start in range(4)
    }


def test_digest_sees_every_word_of_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 7)
    x = torch.arange(30)
    changed = [x.masked_fill(torch.arange(30) == place, 99) for place in range(30)]
    moved = [x.roll(places) for places in range(1, 30)]  # by whole blocks too
    assert len({digest(one) for one in (x, *changed, *moved)}) == 1 + 30 + 29


@pytest.mark.parametrize("block", [7, 64, module.BLOCK])
def test_digests_of_many_are_those_of_each(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    values = torch.randn(200, generator=torch.Generator().manual_seed(1)) * 10
    tensors = [
        values[start : start + size].to(dtype)
        for dtype in (*DTYPES, torch.complex128)
        for size in (0, 1, 7, 8, 28, 150)
        for start in (0, 1, 2)
    ]
    tensors += [values.view(20, 10).t(), values[0], values.requires_grad_()]
    assert digests(tensors) == [int(digest_on_device(tensor)) for tensor in tensors]
    assert len(set(digests(tensors))) > 100
    assert digests([]) == []


@pytest.mark.parametrize("dim", range(5), ids=("batch", "channel", "time", "height", "width"))
@pytest.mark.parametrize(
    "change",
    [lambda x, d: x.flip(d), lambda x, d: x.roll(1, d), lambda x, d: _swapped(x, d)],
    ids=("flip", "roll", "swap"),
)
def test_permutation_along_any_dimension_changes_the_digest(
    change: Callable[[torch.Tensor, int], torch.Tensor], dim: int
) -> None:
    x = latent()
    assert digest(change(x, dim)) != digest(x)


def _swapped(x: torch.Tensor, dim: int) -> torch.Tensor:
    order = [1, 0, *range(2, x.shape[dim])]
    return x.index_select(dim, torch.tensor(order))


@pytest.mark.parametrize("dtype", [t for t in DTYPES if t is not torch.bool], ids=str)
def test_every_single_bit_flip_changes_the_digest(dtype: torch.dtype) -> None:
    x = latent(dtype)[0, 0, 0].clone()
    seen = {digest(x)}
    bits = x.view(BITS[x.element_size()]).view(-1)
    for element in range(bits.numel()):
        for bit in range(8 * x.element_size()):
            flipped = bits.clone()
            flipped[element] ^= -(2**63) if bit == 63 else 1 << bit if bit < 8 * x.element_size() - 1 else _top(bits)
            seen.add(digest(flipped.view(dtype)))
    assert len(seen) == 1 + bits.numel() * 8 * x.element_size()


def _top(bits: torch.Tensor) -> int:
    return 128 if bits.dtype == torch.uint8 else torch.iinfo(bits.dtype).min


def test_signed_zeros_and_nan_payloads_are_told_apart() -> None:
    zeros, negative = torch.zeros(4), torch.tensor([0.0, -0.0, 0.0, 0.0])
    assert torch.equal(zeros, negative)
    assert digest(zeros) != digest(negative)
    nan, other = (
        torch.tensor([payload], dtype=torch.int32).view(torch.float32) for payload in (0x7FC00000, 0x7FC00001)
    )
    assert digest(nan) != digest(other)
    assert digest(nan) == digest(nan.clone())


def test_equal_numbers_of_another_shape_or_dtype_are_told_apart() -> None:
    x = torch.zeros(6)
    assert len({digest(x), digest(x.view(2, 3)), digest(x.view(3, 2)), digest(x.int()), digest(torch.zeros(7))}) == 5


def test_changes_that_cancel_in_a_sum_change_the_digest() -> None:
    x = torch.zeros(64, 64)
    seen = {digest(x)}
    for first in range(64):
        for second in range(64):
            x.zero_()
            x[0, first], x[1, second] = 1.0, -1.0
            seen.add(digest(x))
    assert len(seen) == 1 + 64 * 64


def test_empty_and_scalar_tensors_have_a_digest() -> None:
    assert digest(torch.empty(0)) != digest(torch.tensor(0.0))


def test_digest_is_the_sum_of_words_times_what_splitmix64_says() -> None:
    """Against the arithmetic in Python's integers, so that no device and no version changes it."""
    x = torch.tensor([1.5, -2.0, float("nan")])
    words = x.view(torch.int32).tolist()
    total = 0
    for position, word in enumerate(words, start=1):
        z = position << 32
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        total += word * (z ^ z >> 31 | 1)
    assert digest(x) == f"float32 3 {total % 2**64:016x}"


def test_digest_names_dtype_and_shape() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert re.fullmatch(r"float32 2x3 [0-9a-f]{16}", digest(x))
    assert digest(x) == digest(x.t().contiguous().t())
    assert len({digest(y) for y in (x, x.view(3, 2), x.to(torch.bfloat16), x + torch.eye(3)[:2])}) == 4


@pytest.mark.parametrize("place", [0, 2**19 - 1], ids=["first", "last"])
@pytest.mark.parametrize("size", [2**10, 2**20])
def test_weight_in_host_memory_is_read_whole_if_small_and_in_runs_if_large(size: int, place: int) -> None:
    weights = torch.zeros(size, dtype=torch.bfloat16)
    before = digest_weights([weights, weights])
    assert before[0] == before[1]
    changed = torch.arange(size) == min(2 * place, size - 1)
    assert digest_weights([weights.masked_fill(changed, 1)]) != before[:1]
    assert digest_weights([weights + 1]) != before[:1]
    between = torch.arange(size) == min(9000, size // 2)  # a large one's first run ends before
    assert (digest_weights([weights.masked_fill(between, 1)]) == before[:1]) is (size > 2**17)
