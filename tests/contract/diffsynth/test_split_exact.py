"""A split WanModel computes what the unsplit one does, bit for bit."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.contract.diffsynth import wan
from tests.contract.diffsynth.stages import ON_CPU_AND_GPU, stage_devices
from wanshim.core.model_split import split_model

pytestmark = pytest.mark.usefixtures("deterministic_kernels")
KINDS = ["t2v", "i2v"]
DTYPES = [torch.float32, torch.bfloat16]


@cache
def unsplit_step(kind: str, device: str, dtype: torch.dtype, checkpointing: bool) -> list[torch.Tensor]:
    model = wan.lora_model(kind, device=device, dtype=dtype)
    return wan.train_step(model, kind, device, dtype, use_gradient_checkpointing=checkpointing)


@ON_CPU_AND_GPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "checkpoint"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_split_model_gives_the_unsplit_loss_and_gradients(
    device_type: str, kind: str, checkpointing: bool, dtype: torch.dtype, stages: int
) -> None:
    devices = stage_devices(device_type, stages)
    options = {"use_gradient_checkpointing": checkpointing}
    expected = unsplit_step(kind, devices[0], dtype, checkpointing)
    model = wan.lora_model(kind, device=devices[0], dtype=dtype)
    split_model(model, devices)
    found = wan.train_step(model, kind, devices[0], dtype, **options)
    assert all(map(torch.equal, expected, found))


@ON_CPU_AND_GPU
def test_optimizer_made_before_the_split_trains_the_split_model(device_type: str) -> None:
    devices = stage_devices(device_type, 3)

    def trained(split: bool) -> dict[str, torch.Tensor]:
        model = wan.lora_model(device=devices[0])
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if split:
            split_model(model, devices)
        for _ in range(2):
            wan.train_step(model, "t2v", devices[0], torch.float32)
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad}

    expected, found = trained(split=False), trained(split=True)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.gpu(2)
def test_lora_parameters_lie_with_their_base_layers_and_keep_their_identity() -> None:
    model = wan.lora_model(device="cuda:0")
    before = {name: id(p) for name, p in model.named_parameters()}
    split_model(model, ["cuda:0", "cuda:1"], split_at=2)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    for name, parameter in model.named_parameters():
        late = name.startswith("blocks.") and int(name.split(".")[1]) >= 2
        assert str(parameter.device) == ("cuda:1" if late else "cuda:0"), name


@pytest.mark.gpu(2)
def test_no_move_of_model_or_parent_undoes_the_split() -> None:
    parent = torch.nn.ModuleDict({"dit": wan.lora_model(device="cpu")})
    handle = split_model(parent["dit"], ["cuda:0", "cuda:1"])
    before = {name: p.device for name, p in parent.named_parameters()}
    for move in (
        lambda m: m.to("cuda:0"),
        lambda m: m.cpu(),
        lambda m: m.cuda(1),
        lambda m: m.to("cuda:0", torch.bfloat16),
    ):
        move(parent)
        assert {name: p.device for name, p in parent.named_parameters()} == before
    assert {p.dtype for p in parent.parameters()} == {torch.bfloat16}
    handle.remove()
    assert {str(p.device) for p in parent.parameters()} == {"cpu"}


@pytest.mark.gpu(2)
def test_shared_inputs_cross_once_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """context, t_mod and freqs cross once each; the activation crosses there and back."""
    from wanshim.core.model_split.bridge import Bridge

    crossed: list[torch.Size] = []
    cross = Bridge.cross
    monkeypatch.setattr(
        Bridge, "cross", lambda self, v: (crossed.append(v.shape) if self.needed(v) else None, cross(self, v))[1]
    )
    model = wan.lora_model(device="cuda:0")
    split_model(model, ["cuda:0", "cuda:1"])
    sample = wan.inputs(device="cuda:0")
    wan.model_fn_wan_video(model, **sample, use_gradient_checkpointing=True).sum().backward()
    assert len(crossed) == 5
