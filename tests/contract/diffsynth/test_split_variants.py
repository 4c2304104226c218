"""Every Wan variant, split, computes what it does unsplit, and finds every tensor on its device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from diffsynth.models import wan_video_dit_s2v
from diffsynth.pipelines import wan_video
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.contract.diffsynth import variants, wan
from tests.contract.diffsynth.stages import ON_CPU_AND_GPU, stage_devices
from tests.contract.diffsynth.variant_steps import move_fake, step
from wanshim.core.model_split import split as placement


@pytest.fixture
def deterministic(deterministic_kernels: None) -> Iterator[None]:
    """Some operators of the variants have no deterministic kernel: a warning for those. Where warnings do, the fused
    attention's backward adds in any order; plain products do not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield


@cache
def unsplit_step(name: str, device: str, checkpointing: bool) -> list[torch.Tensor]:
    return step(variants.tiny(name, device), use_gradient_checkpointing=checkpointing)


SWEEP = [pytest.mark.slow, pytest.mark.sweep]
WAYS = ((3, False), (2, True), (4, True))  # stages, checkpointing


@pytest.mark.usefixtures("deterministic")
@ON_CPU_AND_GPU
@pytest.mark.parametrize(
    ("name", "stages", "checkpointing"),
    [
        pytest.param(name, *way, marks=SWEEP * (way != WAYS[0 if name == "s2v" else number % 3]))
        for number, name in enumerate(variants.MAKERS)
        for way in WAYS
    ],
)
def test_split_variant_gives_the_unsplit_loss_and_gradients(
    device_type: str, name: str, stages: int, checkpointing: bool
) -> None:
    if name == "s2v" and checkpointing:
        pytest.skip("S2V's checkpointing crashes in DiffSynth itself; test_s2v_checkpointing.py fixes and splits it")
    devices = stage_devices(device_type, stages)
    if len(set(devices)) < stages:
        pytest.skip(f"needs {stages} CUDA devices: gradients of what all blocks share are summed device by device")
    expected = unsplit_step(name, devices[0], checkpointing)
    made = variants.tiny(name, devices[0])
    variants.split(made, devices)
    found = step(made, use_gradient_checkpointing=checkpointing)
    assert torch.isfinite(expected[0])
    assert all(map(torch.equal, expected, found))


def lora_file(name: str, stages: int) -> bytes:
    """The LoRA file after two optimizer steps over `stages`, 1 for the whole model."""
    made = variants.tiny(name)
    for module in made.modules().values():
        module.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, target_modules=wan.TARGETS), made.dit)
    trained = {path: p for path, p in made.dit.named_parameters() if p.requires_grad}
    for path, parameter in trained.items():
        torch.nn.init.normal_(parameter, std=0.1 if "lora_B" in path else 0.3)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    if stages > 1:
        variants.split(made, stage_devices("cpu", stages))
    for seed in (1, 2):
        torch.manual_seed(seed)
        made(use_gradient_checkpointing=name != "s2v").pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return save(trained)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "name", [n if n == "vace" else pytest.param(n, marks=pytest.mark.sweep) for n in variants.MAKERS]
)
def test_split_variant_writes_the_lora_file_of_unsplit_training(name: str) -> None:
    expected = lora_file(name, 1)
    assert lora_file(name, 3) == expected
    assert lora_file(name, 1) == expected  # or the comparison would say nothing


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Devices that are not there, tensors that have no memory."""
    monkeypatch.setattr(placement, "_move_own", move_fake)
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda self: None)  # nothing to fill
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)  # WanToDance's encoder, in its forward
    monkeypatch.setattr(wan_video_dit_s2v.WanS2VModel, "inject_motion", lambda self, *kept, **__: kept[:3])
    # S2V reads its grid sizes on the host, which fake tensors do not have: frequencies of the right shape.
    for module in (wan_video_dit_s2v, wan_video):
        monkeypatch.setattr(
            module,
            "rope_precompute",
            lambda x, *_, **__: torch.view_as_complex(x.detach().reshape(*x.shape[:3], -1, 2).to(torch.float64)),
        )
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "name", [n if n in ("t2v", "vace", "s2v") else pytest.param(n, marks=pytest.mark.sweep) for n in variants.MAKERS]
)
def test_variant_of_full_width_finds_every_tensor_on_its_device(name: str) -> None:
    devices = [f"cuda:{i}" for i in range(4)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda:0"):
            made = variants.MAKERS[name](variants.FULL_WIDTH)
        for module in made.modules().values():
            module.train()
        handle = variants.split(made, devices)
        output = made()
    assert str(output.device) == "cuda:0"
    assert output.shape == made.inputs["latents"].shape
    used = {str(p.device) for p in made.dit.blocks.parameters()}
    assert used == set(devices)
    for stage in handle.plan.stages:
        for block in made.dit.blocks[stage.first : stage.last]:
            assert {str(p.device) for p in block.parameters()} == {stage.device}
