"""Pipelined micro-batches give the losses and gradients of one after the other, bit for bit."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.contract.diffsynth import wan
from tests.contract.diffsynth.stages import ON_CPU_AND_GPU, stage_devices
from wanshim.core.model_split import split_model
from wanshim.core.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("deterministic_kernels")


def loss_of(model: Any, kind: str, seed: int, device: str, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    sample = wan.inputs(kind, seed, device=device, dtype=dtype)
    sample["timestep"] = sample["timestep"] - seed
    output = wan.model_fn_wan_video(model, **sample, **options)
    return torch.nn.functional.mse_loss(output.float(), sample["latents"].float())


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    assert found
    return found


def serial(model: Any, kind: str, count: int, device: str, dtype: torch.dtype, **options: Any) -> list[float]:
    losses = []
    for seed in range(count):
        loss = loss_of(model, kind, seed, device, dtype, **options)
        (loss / count).backward()
        losses.append(loss.item())
    return losses


def pipelined(
    pipeline: Pipeline, model: Any, kind: str, count: int, device: str, dtype: torch.dtype, **options: Any
) -> list[float]:
    losses = []
    for seed in range(count):
        pending = pipeline.submit(lambda seed=seed: loss_of(model, kind, seed, device, dtype, **options))
        pipeline.backward(pending, lambda loss: (loss / count).backward())
        losses.append(pending)
    pipeline.join()
    return [loss.item() for loss in losses]


@cache
def unsplit(
    kind: str, count: int, device: str, dtype: torch.dtype, checkpointing: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of the model that is not split."""
    model = wan.lora_model(kind, device=device, dtype=dtype)
    return serial(model, kind, count, device, dtype, use_gradient_checkpointing=checkpointing), gradients(model)


def pipeline_devices(device_type: str, stages: int) -> list[str]:
    """A pipeline copies between devices itself: on cpu:1 nothing that it copied would arrive."""
    return ["cpu"] * stages if device_type == "cpu" else stage_devices(device_type, stages)


# Kind, whether blocks are checkpointed, stages, micro-batches: each value of each once or twice.
FEW = (("t2v", True, 2, 5), ("t2v", False, 4, 5), ("i2v", True, 3, 5), ("i2v", False, 2, 1))


@pytest.mark.slow
@ON_CPU_AND_GPU
@pytest.mark.parametrize(
    ("kind", "checkpointing", "stages", "count"),
    [
        pytest.param(*case, marks=[pytest.mark.sweep] * (case not in FEW))
        for case in product(("t2v", "i2v"), (False, True), (2, 3, 4), (1, 5))
    ],
)
def test_lanes_give_the_serial_losses_and_gradients(
    device_type: str, kind: str, checkpointing: bool, stages: int, count: int
) -> None:
    devices, dtype = pipeline_devices(device_type, stages), torch.bfloat16
    options = {"use_gradient_checkpointing": checkpointing}
    expected, expected_gradients = unsplit(kind, count, devices[0], dtype, checkpointing)
    model = wan.lora_model(kind, device=devices[0], dtype=dtype)
    pipeline = Pipeline(split_model(model, devices, exits=("head",)))
    for _ in range(2):  # a second round on the same pipeline
        model.zero_grad()
        assert pipelined(pipeline, model, kind, count, devices[0], dtype, **options) == expected
    found = gradients(model)
    assert found.keys() == expected_gradients.keys()
    assert all(torch.equal(found[name], grad) for name, grad in expected_gradients.items())
    pipeline.remove()
    model.zero_grad()
    assert serial(model, kind, count, devices[0], dtype, **options) == expected


@ON_CPU_AND_GPU
@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "checkpoint"])
@pytest.mark.parametrize("stages", [2, 4])
def test_lanes_train_every_parameter_as_unsplit(device_type: str, checkpointing: bool, stages: int) -> None:
    """Full training: embeddings and head too, whose gradients every block adds to."""
    devices, dtype = pipeline_devices(device_type, stages), torch.float32
    options = {"use_gradient_checkpointing": checkpointing}
    plain = wan.lora_model(device=devices[0], dtype=dtype).requires_grad_(True)
    expected = serial(plain, "t2v", 3, devices[0], dtype, **options)
    model = wan.lora_model(device=devices[0], dtype=dtype).requires_grad_(True)
    pipeline = Pipeline(split_model(model, devices, exits=("head",)))
    assert pipelined(pipeline, model, "t2v", 3, devices[0], dtype, **options) == expected
    found = gradients(model)
    assert [n for n, grad in gradients(plain).items() if not torch.equal(found[n], grad)] == []
