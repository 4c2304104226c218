"""MiniMax-H3's blocks, trained by the table of its family: the same numbers, the same files."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("torchaudio", reason="DiffSynth's MiniMax-H3 imports it")
pytest.importorskip("diffsynth.models.minimax_h3_dit", reason="this release has no MiniMax-H3")

from tests.contract.diffsynth import minimax_h3 as h3
from tests.contract.diffsynth.stages import ON_CPU_AND_GPU, stage_devices
from wanshim.adapters.diffsynth.splitting.minimax_h3 import FAMILY

KINDS = {
    "plain": {},
    "control net": {"control": True},
    "guidance": {"cfg_scale": 2.0},
    "sizes": {"sizes": {2: {"num_frames": 39, "text": 9}}},
}


def made(kind: str = "plain", *, dtype: torch.dtype = torch.bfloat16, layers: int = 4) -> h3.Training:
    parts = {"controlnet": h3.control_net(dtype)} if kind == "control net" else {}
    return h3.Training(h3.pipe_of(h3.lora_model(dtype=dtype, layers=layers), **parts), **KINDS[kind])


@cache
def plain_step(kind: str, dtype: torch.dtype = torch.bfloat16, checkpointing: bool = True) -> list[torch.Tensor]:
    """Of DiffSynth alone."""
    module = made(kind, dtype=dtype)
    module.use_gradient_checkpointing = checkpointing
    return h3.step(module)


@pytest.mark.parametrize("split_at", [None, (1,), (3,), (1, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_split_gives_the_unsplit_loss_and_gradients(kind: str, split_at: tuple[int, ...] | None) -> None:
    devices = tuple(stage_devices("cpu", len(split_at or (2,)) + 1))
    module = made(kind)
    handle = FAMILY.split(module.pipe, devices, split_at)
    found = h3.step(module)
    assert handle.plan.stages[-1].last == 4
    assert all(map(torch.equal, plain_step(kind), found))
    handle.remove()
