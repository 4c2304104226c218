"""Quantised bases over two real GPUs: the loss and gradients of the same base on one."""

from __future__ import annotations

import pytest
import torch

import wanshim
from tests.contract.diffsynth import fp8_models, variants, wan
from wanshim.adapters.diffsynth.splitting import low_precision as quantized_base
from wanshim.core.model_split import split_model
from wanshim.core.model_split.quantize import quantize_base

DEVICES = ["cuda:0", "cuda:1"]
pytestmark = [pytest.mark.gpu(2), pytest.mark.usefixtures("deterministic_kernels")]


@pytest.mark.parametrize("base", ["float8", "int8"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "checkpoint"])
def test_quantised_split_on_two_gpus_gives_the_unsplit_loss_and_gradients(base: str, checkpointing: bool) -> None:
    def step(*, split: bool) -> list[torch.Tensor]:
        model = wan.lora_model(device=DEVICES[0], dtype=torch.bfloat16)
        quantize_base(model.blocks, base)
        if split:
            plan = split_model(model, DEVICES, exits=("head",)).plan
            assert plan.devices == tuple(DEVICES)
        return wan.train_step(model, "t2v", DEVICES[0], torch.bfloat16, use_gradient_checkpointing=checkpointing)

    assert all(map(torch.equal, step(split=False), step(split=True)))


@pytest.mark.parametrize("name", ["t2v", "s2v"])
@pytest.mark.parametrize("active", [False, True], ids=["off", "on"])
def test_fp8_models_over_two_gpus_give_the_gradients_of_the_same_base_dequantised(name: str, active: bool) -> None:
    """With and without `diffsynth.fp8_lora`, which a split does not need."""
    _, expected = fp8_models.step(*fp8_models.with_lora(name, managed=False, device=DEVICES[0]), False)
    wanshim.activate("none,diffsynth.fp8_lora" if active else "none")
    made, owner = fp8_models.with_lora(name, managed=True, device=DEVICES[0])
    handle = variants.split(made, DEVICES)
    assert quantized_base.place_wrappers(handle)
    assert {str(p.device) for p in owner.parameters()} == set(DEVICES)
    _, found = fp8_models.step(made, owner, False)
    assert found.keys() == expected.keys()
    different = [path for path, gradient in expected.items() if not torch.equal(found[path].cpu(), gradient.cpu())]
    assert different == []
    handle.remove()
