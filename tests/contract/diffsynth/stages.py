"""Devices that stand for a split's stages, on the CPU and on GPUs."""

from __future__ import annotations

import itertools

import pytest
import torch

ON_CPU_AND_GPU = pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])


def stage_devices(device_type: str, stages: int) -> list[str]:
    """One for each stage. From cpu:0 to cpu:1 tensors are copied as between GPUs, and gradients summed apart."""
    if device_type == "cpu":
        return [f"cpu:{i}" for i in range(stages)]
    cards = itertools.cycle(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    return list(itertools.islice(cards, stages))
