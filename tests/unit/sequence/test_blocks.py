"""Blocks whose tokens are apart beside attention, and those in which a part of a sample has other values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from wanshim.core.sequence import BlockList, check_tokens_apart
from wanshim.core.sequence.blocks import argument_names, heads_of
from wanshim.errors import ModelInvalid


class Quantized(nn.Linear):
    """Products of eight-bit numbers, whose scale is by all tokens, or by each."""

    calls = 0

    def __init__(self, *sizes: int, dim: int | None, **given: Any) -> None:
        super().__init__(*sizes, **given)
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        largest = x.abs().amax() if self.dim is None else x.abs().amax(self.dim, keepdim=True)
        scale = largest.float() / 127
        return (super().forward((x / scale).round().to(self.weight.dtype)) * scale).to(x.dtype)


class Broken(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("this layer computes on a GPU alone")


def lists(*layers: nn.Module) -> list[BlockList]:
    return [BlockList(blocks=[nn.Sequential(nn.Linear(8, 8), layer) for layer in layers])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_scale_of_all_tokens_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ModelInvalid, match="1 of Sequential 1 quantizes all tokens with one scale"):
        check_tokens_apart(lists(nn.Linear(8, 8), Quantized(8, 8, dim=None, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scale_of_each_token_is_none_of_that_and_asked_once(dtype: torch.dtype) -> None:
    Quantized.calls = 0
    check_tokens_apart(lists(*(Quantized(8, 8, dim=-1, dtype=dtype) for _ in range(3))))
    assert Quantized.calls == 2


def test_a_layer_that_cannot_compute_here_is_let_through() -> None:
    check_tokens_apart(lists(Broken(8, 8), nn.Linear(8, 8, device="meta"), Quantized(8, 8, dim=-1, device="meta")))


def compilable() -> tuple[nn.Module, list[BlockList]]:
    blocks = [nn.ModuleDict({"attn": nn.Sequential(nn.Linear(8, 8)), "ffn": nn.Linear(8, 8)}) for _ in range(2)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(8, 8)})
    return model, [BlockList(blocks=blocks, exit=model["head"], attention="attn.0", projections=())]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("", "ModuleDict"),
        ("head", "Linear behind the blocks"),
        ("blocks.1", "ModuleDict 1"),
        ("blocks.1.attn", "attn of ModuleDict 1"),
        ("blocks.1.attn.0", "attn.0 of ModuleDict 1"),
    ],
)
def test_a_graph_in_which_tokens_would_be_exchanged_is_refused_by_name(path: str, named: str) -> None:
    model, listed = compilable()
    model.get_submodule(path).compile()
    with pytest.raises(ModelInvalid, match=rf"^{re.escape(named)} is compiled by torch\.compile"):
        check_tokens_apart(listed, model)


def test_a_graph_beside_what_is_exchanged_is_let_through() -> None:
    model, listed = compilable()
    model["blocks"][0]["ffn"].compile()
    check_tokens_apart(listed, model)


def test_a_part_that_a_block_lacks_is_named() -> None:
    with pytest.raises(ModelInvalid, match=r"Sequential 0 has no module self_attn"):
        heads_of(lists(nn.Linear(8, 8)))
    blocks = [nn.Sequential(nn.Linear(8, 8))]
    with pytest.raises(ModelInvalid, match=r"Sequential 0 has no number attn\.heads"):
        heads_of([BlockList(blocks=blocks, attention="0", projections=(), num_heads=("attn.heads",))])


class Wrapper(nn.Module):
    """Computes in a copy of its module, as DiffSynth's VRAM management does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_wrapper_that_hands_on_whatever_it_gets_takes_the_arguments_of_its_module() -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor, *rest: Any, mask: Any = None) -> torch.Tensor:
            return x

    assert argument_names(Block()) == argument_names(Wrapper(Wrapper(Block()))) == ("x", "rest", "mask")
    assert argument_names(Wrapper(nn.Identity())) == ("input",)
