"""The digest that every step computes: bits and places count, and nothing has to be read for it."""

from __future__ import annotations

import pytest
import torch

from wanshim.core.shared import digest
from wanshim.core.shared.digest import digest_on_device

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex128]


def values(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 7, 2, dtype=torch.float64, generator=generator).mul(9).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors_have_equal_digests_whatever_their_strides(dtype: torch.dtype) -> None:
    x = values(dtype)
    found = digest_on_device(x)
    assert (found.dim(), found.dtype) == (0, torch.int64)
    assert found == digest_on_device(x.transpose(0, 1).contiguous().transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_place_in_memory_does_not_change_it(dtype: torch.dtype) -> None:
    x = values(dtype).reshape(-1)
    for count in (82, 80):  # words of an element and of eight bytes
        aligned = digest_on_device(x[1 : 1 + count].clone())
        assert digest_on_device(x[1 : 1 + count]) == aligned
        assert digest_on_device(x[:count]) != aligned or torch.equal(x[:count], x[1 : 1 + count])


@pytest.mark.parametrize("block", [5, digest.BLOCK], ids=["many blocks", "one block"])
@pytest.mark.parametrize("dtype", [t for t in DTYPES if t != torch.bool], ids=str)
def test_one_changed_element_and_two_exchanged_ones_change_it(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "BLOCK", block)
    x = values(dtype)
    seen = {digest_on_device(x).item()}
    flat = x.reshape(-1)
    for place in range(1, flat.numel()):
        changed, exchanged = flat.clone(), flat.clone()
        changed[place] += 1
        exchanged[place], exchanged[0] = flat[0], flat[place]
        seen |= {digest_on_device(changed).item()}
        if flat[place] != flat[0]:
            assert digest_on_device(exchanged) != digest_on_device(x)
    assert len(seen) == flat.numel()


def test_nan_equals_itself_and_negative_zero_is_not_zero() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert digest_on_device(nan) == digest_on_device(nan.clone())
    assert digest_on_device(torch.tensor([0.0])) != digest_on_device(torch.tensor([-0.0]))
