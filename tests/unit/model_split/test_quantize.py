"""Quantised frozen weights: counted as stored, moved as themselves, never LoRA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wanshim.core.model_split import split_model
from wanshim.core.model_split.quantize import quantize_base, quantized_names
from wanshim.core.shared.weight_bytes import base_dtypes, num_bytes, stored
from wanshim.errors import PlacementInvalid

pytest.importorskip("torchao", reason="a quantised base is an extra: pip install 'wanshim[torchao]'")
BASES = pytest.mark.parametrize("base", ["float8", "int8"])


class Model(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(blocks)
        )
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@BASES
def test_quantised_weights_are_counted_as_they_are_stored(base: str) -> None:
    model = Model()
    before = num_bytes(model.blocks)
    assert quantize_base(model.blocks, base) == 8
    values, biases, scales = 4 * 2 * 32 * 64, 4 * (64 + 32) * 2, 4 * (64 + 32) * 4
    zero_points = 4 * (64 + 32) if base == "int8" else 0
    assert before == 2 * values + biases
    assert num_bytes(model.blocks) == values + biases + scales + zero_points
    assert all(name.startswith("blocks.") for name in quantized_names(model, trained=False))
    assert base_dtypes(model.blocks).startswith("float8_e4m3fn 8" if base == "float8" else "int8 8")


@BASES
def test_plan_balances_stored_bytes_and_says_the_base(base: str) -> None:
    """Two of six blocks are quantised: their bytes halve, and the cut moves."""
    model = Model(6)
    assert split_model(model, ["cpu", "cpu"]).plan.split_at == (3,)
    model = Model(6)
    quantize_base(model.blocks[:4], base)
    handle = split_model(model, ["cpu", "cpu"])
    assert handle.plan.split_at == (4,)
    assert sum(stage.num_bytes for stage in handle.plan.stages) == num_bytes(model.blocks)
    assert "frozen weights of the blocks: " in str(handle.plan)
    assert "bfloat16" in handle.plan.base


@BASES
def test_quantised_layers_move_as_themselves_and_stay_when_a_parent_moves(base: str) -> None:
    model = Model()
    quantize_base(model.blocks, base)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    expected = model(x)
    before = {name: id(p) for name, p in model.named_parameters()}
    kinds = {name: type(p) for name, p in model.named_parameters()}
    handle = split_model(model, ["cpu", "cpu"])
    nn.ModuleDict({"dit": model}).to(device="cpu", dtype=torch.bfloat16)
    assert torch.equal(model(x), expected)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert {name: type(p) for name, p in model.named_parameters()} == kinds
    handle.remove()
    assert torch.equal(model(x), expected)


@BASES
def test_quantised_weight_changes_device_as_one_tensor_and_keeps_its_identity(base: str) -> None:
    """To the meta device: the only other one that every machine has."""
    model = Model()
    quantize_base(model.blocks, base)
    names = quantized_names(model, trained=False)
    before = {name: (id(p), type(p), p.dtype) for name, p in model.named_parameters() if name in names}
    split_model(model, ["meta", "meta"])
    assert {name: (id(p), type(p), p.dtype) for name, p in model.named_parameters() if name in names} == before
    assert {part.device.type for p in model.parameters() for part in stored(p)} == {"meta"}


@BASES
def test_lora_is_left_as_it_is_trained_or_frozen(base: str) -> None:
    peft = pytest.importorskip("peft")
    model = Model()
    config = peft.LoraConfig(r=4, target_modules=r"blocks\.\d+\.[02]")
    model = peft.inject_adapter_in_model(config, model)
    model.requires_grad_(False)
    assert quantize_base(model.blocks, base) == 8
    names = quantized_names(model, trained=False)
    assert len(names) == 8
    assert all(name.endswith("base_layer.weight") for name in names)


def test_unknown_base_and_rounded_weights_are_refused_and_nothing_is_changed() -> None:
    model = Model()
    with pytest.raises(PlacementInvalid, match="base 'fp4'"):
        quantize_base(model.blocks, "fp4")
    last = model.blocks[-1][2]
    last.weight = nn.Parameter(last.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(PlacementInvalid, match="float8_e4m3fn"):
        quantize_base(model.blocks, "float8")
    assert not quantized_names(model, trained=False)
