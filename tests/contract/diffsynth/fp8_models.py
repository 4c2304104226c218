"""Models as `--fp8_models` wraps them, with LoRA, and one step of each."""

from __future__ import annotations

from typing import Any

import torch
from diffsynth.core.vram.layers import enable_vram_management
from diffsynth.models.model_loader import ModelPool
from peft import LoraConfig, inject_adapter_in_model

from tests.contract.diffsynth import variants, wan

FP8, BFLOAT16 = torch.float8_e4m3fn, torch.bfloat16


OWNERS = {"t2v": "dit", "s2v": "dit", "vace": "vace"}  # the model that gets LoRA


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
