"""Chunks of tokens: the bits of the whole where each token is worked on alone, close to it where products are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wanshim.core.strategy.chunking import chunk_module, chunk_rotary, in_chunks
from wanshim.errors import PlacementInvalid

TOKENS, DIM = 37, 16  # no multiple of a chunk


class Norm(nn.Module):
    """RMS norm in fp32 as Wan's blocks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight.to(x.dtype)


def rotate(x: torch.Tensor, freqs: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rotary embedding through complex128, as DiffSynth computes it."""
    heads = x.unflatten(2, (num_heads, -1))
    turned = torch.view_as_complex(heads.double().unflatten(-1, (-1, 2))) * freqs
    return torch.view_as_real(turned).flatten(2).to(x.dtype)


def both_ways(compute: object, x: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_(True)
    output = checkpoint(compute, leaf, use_reentrant=False)  # type: ignore[arg-type]
    weight = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), [leaf, *parameters])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 8, 36, 37, 100])
def test_norm_and_rotary_in_chunks_give_the_bits_of_the_whole(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, TOKENS, DIM).to(dtype)
    freqs = torch.polar(torch.ones(TOKENS, 1, 4, dtype=torch.float64), torch.rand(TOKENS, 1, 4, dtype=torch.float64))
    norm, rotary = Norm(), chunk_rotary(rotate, tokens)
    chunked = chunk_module(norm, norm.forward, tokens)
    expected = both_ways(lambda part: rotate(norm(part), freqs, 2), x, [])
    found = both_ways(lambda part: rotary(chunked(part), freqs, 2), x, [])
    assert all(map(torch.equal, expected, found))


def test_rotary_is_cut_only_where_there_is_a_frequency_for_each_token() -> None:
    calls = []

    def rotate(x: torch.Tensor, freqs: torch.Tensor, num_heads: int) -> torch.Tensor:
        calls.append((x.shape[1], freqs.shape[0], num_heads))
        return x

    chunked, x = chunk_rotary(rotate, 4), torch.zeros(1, 10, 8)
    chunked(x, torch.zeros(10, 1, 2), 2)
    assert calls == [(4, 4, 2), (4, 4, 2), (2, 2, 2)]
    calls.clear()
    chunked(x, torch.zeros(1, 1, 2), 2)
    assert calls == [(10, 1, 2)]


def test_feed_forward_in_chunks_is_equal_up_to_the_order_of_summation() -> None:
    torch.manual_seed(0)
    ffn = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(approximate="tanh"), nn.Linear(64, DIM)).double()
    ffn[0].weight.requires_grad_(False)
    trained = [p for p in ffn.parameters() if p.requires_grad]
    x = torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    expected = both_ways(ffn, x, trained)
    found = both_ways(chunk_module(ffn, ffn.forward, 8), x, trained)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    assert found[2].abs().max() > 0


def test_gradients_of_parameters_are_summed_over_chunks_in_fp32() -> None:
    """37 gradients of 1 + 1/64 in bf16 would lose the fractions as the sum grows."""
    scale = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    x = torch.full((1, TOKENS, 1), 1 + 1 / 64, dtype=torch.bfloat16)
    in_chunks(lambda part, start, stop: part * scale, x, 1, (scale,)).sum().backward()
    assert scale.grad is not None
    assert scale.grad.item() == torch.tensor(TOKENS * (1 + 1 / 64)).bfloat16().item()


def test_autocast_of_the_forward_holds_when_a_chunk_is_computed_again() -> None:
    linear, seen = nn.Linear(DIM, DIM), []

    def compute(part: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        result = linear(part)
        seen.append(result.dtype)
        return result

    x = torch.randn(1, 8, DIM, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = in_chunks(compute, x, 4, (linear.weight,))
    output.sum().backward()
    assert seen == [torch.bfloat16] * 4


def test_module_that_drops_out_at_random_is_not_cut() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    with pytest.raises(PlacementInvalid, match="drops out at random"):
        chunk_module(module, module.forward, 2)


def test_dropout_that_drops_nothing_is_no_obstacle_and_chunks_are_of_the_asked_size() -> None:
    module, sizes = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.shape[1])
        return x

    chunk_module(module, forward, 2)(torch.zeros(3, 5, 4))
    assert sizes == [2, 2, 1]


def test_one_chunk_is_the_call_itself() -> None:
    """Nothing is computed again for it: backward takes the graph of the one forward pass."""
    calls, x = [], torch.ones(1, 4, 2, requires_grad=True)

    def compute(part: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        calls.append((start, stop))
        return part * 3

    in_chunks(compute, x, 4).sum().backward()
    assert calls == [(0, 4)]
