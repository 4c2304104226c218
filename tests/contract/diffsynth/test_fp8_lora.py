"""LoRA on a base of `--fp8_models`: DiffSynth's own loses every gradient, and the gradients with the repair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffsynth.core.vram import layers
from diffsynth.core.vram.layers import enable_vram_management
from diffsynth.models.model_loader import ModelPool
from peft import LoraConfig, inject_adapter_in_model

import wanshim
from tests.contract.diffsynth import variants, wan
from wanshim.core.model_split import split_model

FEATURE = "diffsynth.fp8_lora"
FP8, BFLOAT16 = torch.float8_e4m3fn, torch.bfloat16
COPIES_EVERY_BLOCK = hasattr(layers.AutoWrappedNonRecurseModule, "_copy_with_shared_children")
OWNERS = {"t2v": "dit", "s2v": "dit", "vace": "vace"}  # the model that gets LoRA


@pytest.fixture(autouse=True)
def _cache_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """DiffSynth empties the cache of whatever device it runs on, and the host has none."""
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)


def with_lora(name: str, *, managed: bool, device: str = "cpu") -> tuple[variants.Variant, torch.nn.Module]:
    """A variant whose base holds fp8 values: wrapped as `--fp8_models` wraps it, or dequantised and plain."""
    made = variants.tiny(name, device)
    owner = made.modules()[OWNERS[name]]
    for module in made.modules().values():
        module.requires_grad_(False).to(BFLOAT16)
    for parameter in owner.parameters():
        parameter.data = parameter.data.to(FP8) if managed else parameter.data.to(FP8).to(BFLOAT16)
    if managed:
        manage(owner, device)
    torch.manual_seed(3)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=wan.TARGETS), owner)
    for path, parameter in owner.named_parameters():
        if "lora_" in path:
            parameter.data = torch.randn(parameter.shape).mul_(0.1).to(device, BFLOAT16)
    made.inputs = {
        k: v.to(BFLOAT16) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in made.inputs.items()
    }
    return made, owner


def manage(model: torch.nn.Module, device: str) -> None:
    """As DiffSynth's loader does under `--fp8_models`."""
    config: dict[str, Any] = {"computation_dtype": BFLOAT16, "computation_device": device}
    for state in ("offload", "onload", "preparing"):
        config |= {f"{state}_dtype": FP8, f"{state}_device": device}
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    enable_vram_management(model, ModelPool().fetch_module_map(name, config), vram_config=config)


def step(made: variants.Variant, owner: torch.nn.Module, checkpointing: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss, and the gradients of the LoRA layers, by the names they have without wrappers."""
    loss = made(use_gradient_checkpointing=checkpointing).float().pow(2).mean()
    loss.backward()
    named = owner.named_parameters()
    return loss.detach(), {name.replace("module.", ""): p.grad for name, p in named if p.requires_grad}


@pytest.mark.parametrize("name", OWNERS)
def test_fp8_lora_without_the_feature_gets_no_gradient(name: str) -> None:
    """The day this fails, upstream has fixed it and the feature can go."""
    wanshim.activate("none")
    _, gradients = step(*with_lora(name, managed=True), False)
    lost = name != "t2v" or COPIES_EVERY_BLOCK
    in_blocks = [gradient for path, gradient in gradients.items() if path.startswith(("blocks.", "vace_blocks."))]
    assert len(in_blocks) >= 80
    assert {gradient is None for gradient in in_blocks} == {lost}


@pytest.mark.usefixtures("deterministic_kernels")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "checkpoint"])
@pytest.mark.parametrize("name", OWNERS)
def test_fp8_lora_gives_the_gradients_of_the_same_base_dequantised(name: str, checkpointing: bool) -> None:
    if name == "s2v" and checkpointing:
        wanshim.activate(f"none,{FEATURE},diffsynth.s2v_checkpointing")
    else:
        wanshim.activate(f"none,{FEATURE}")
    loss, expected = step(*with_lora(name, managed=False), checkpointing)
    made, owner = with_lora(name, managed=True)
    found_loss, found = step(made, owner, checkpointing)
    assert torch.equal(found_loss, loss)
    assert found.keys() == expected.keys()
    assert all(gradient.any() for gradient in expected.values())
    assert all(torch.equal(found[path], gradient) for path, gradient in expected.items())
    assert FP8 in {parameter.dtype for parameter in owner.parameters()}
    assert wanshim.report().row(FEATURE).state == "exercised"


def test_fp8_lora_in_another_dtype_keeps_it_and_its_place_in_the_model() -> None:
    wanshim.activate(f"none,{FEATURE}")
    made, owner = with_lora("s2v", managed=True)
    trained = {name: p for name, p in owner.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data = parameter.data.float()
    _, gradients = step(made, owner, False)
    assert {p.dtype for p in trained.values()} == {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert {name: p for name, p in owner.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("name", ["t2v", "s2v"])
@pytest.mark.parametrize("active", [False, True], ids=["off", "on"])
def test_fp8_lora_under_a_split_trains_with_the_feature_on_and_off(name: str, active: bool) -> None:
    from wanshim.adapters.diffsynth.splitting import low_precision as quantized_base

    wanshim.activate(f"none,{FEATURE}" if active else "none")
    _, expected = step(*with_lora(name, managed=False), False)
    made, owner = with_lora(name, managed=True)
    handle = split_model(owner, ["cpu", "cpu"], blocks="blocks", exits=("head",))
    assert quantized_base.place_wrappers(handle)
    _, found = step(made, owner, False)
    assert all(torch.equal(found[path], gradient) for path, gradient in expected.items())
    if active:
        assert wanshim.report().row(FEATURE).state == "exercised"
    handle.remove()
    assert not any({"cast_to", "_copy_with_shared_children"} & vars(module).keys() for module in owner.modules())


def test_fp8_lora_is_a_repair_that_auto_selects() -> None:
    wanshim.activate("auto")
    assert wanshim.report().row(FEATURE).state in ("applied", "exercised", "registered")
