"""TeaCache over a split: the same latents step by step, and steps that are really answered from the cache."""

from __future__ import annotations

import pytest
import torch
from diffsynth.pipelines import wan_video
from torch._subclasses.fake_tensor import FakeTensorMode

import wanshim
from tests.contract.diffsynth import variants
from tests.contract.diffsynth.stages import ON_CPU_AND_GPU, stage_devices
from wanshim.adapters.diffsynth.splitting.wan import FAMILY

FEATURE = "diffsynth.model_split"
STEPS = 6


def denoised(made: variants.Variant) -> tuple[list[torch.Tensor], list[int]]:
    """The outputs of all steps, on the host, and how often the first block had run after each."""
    cache = wan_video.TeaCache(STEPS, rel_l1_thresh=0.2, model_id="Wan2.1-T2V-14B")
    runs: list[int] = []
    hook = made.dit.blocks[0].register_forward_pre_hook(lambda *_: runs.append(len(outputs)))
    outputs: list[torch.Tensor] = []
    counts = []
    with torch.no_grad():
        for step in range(STEPS):
            made.inputs["timestep"] = torch.full_like(made.inputs["timestep"], 900.0 - 2 * step)
            outputs.append(made(tea_cache=cache).cpu())
            counts.append(len(runs))
            made.inputs["latents"] = made.inputs["latents"] - 0.1 * outputs[-1].to(made.inputs["latents"].device)
    hook.remove()
    return outputs, counts


@ON_CPU_AND_GPU
@pytest.mark.parametrize("name", ["t2v", "i2v"])
@pytest.mark.parametrize("stages", [2, 3])
def test_teacache_over_a_split_gives_the_unsplit_steps(device_type: str, name: str, stages: int) -> None:
    devices = stage_devices(device_type, stages)
    expected, computed = denoised(variants.tiny(name, devices[0]))
    assert 2 <= computed[-1] < STEPS  # first and last step are computed, others come from the cache
    wanshim.activate(f"none,{FEATURE}")
    made = variants.tiny(name, devices[0])
    FAMILY.split(made.pipe, tuple(devices))
    found, split_computed = denoised(made)
    assert split_computed == computed
    assert all(map(torch.equal, expected, found))


def test_residual_is_kept_where_the_next_steps_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What left the last block is on another device than what entered the first."""
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    with FakeTensorMode():
        for active in (False, True):
            wanshim.activate(f"none,{FEATURE}" if active else "none")
            cache = wan_video.TeaCache(STEPS, rel_l1_thresh=0.2, model_id="Wan2.1-T2V-14B")
            cache.previous_hidden_states = torch.empty(1, 4, 8, device="cuda:0")
            if active:
                cache.store(torch.empty(1, 4, 8, device="cuda:1"))
                assert str(cache.previous_residual.device) == "cuda:0"
            else:
                with pytest.raises(RuntimeError, match="device"):
                    cache.store(torch.empty(1, 4, 8, device="cuda:1"))
