"""A script that offloads its models generates over GPUs as it does alone: it is started as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import wanshim
from tests.contract.diffusers import offloading, wan_pipelines
from wanshim.core.generation import shared_pipeline
from wanshim.errors import ModelInvalid

ROOT = Path(__file__).parents[3]
SCRIPT = "tests.contract.diffusers.offloading"
# What offloads layer by layer through accelerate computes on a GPU alone: tests/gpu/generation has it.
WAYS = [
    ("model", "wan22"),
    ("leaf", "wan"),
    pytest.param("model", "wan", marks=pytest.mark.sweep),
    pytest.param("block", "wan22", marks=pytest.mark.sweep),
    pytest.param("none", "wan", marks=pytest.mark.sweep),
]


def run(folder: Path, *command: str) -> tuple[list[torch.Tensor], str]:
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, sys.executable, "-m", SCRIPT, *folder.name.split()[:2]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "frames.pt", weights_only=True), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), WAYS)
def test_script_that_offloads_has_its_frames_over_gpus(way: str, kind: str, tmp_path: Path) -> None:
    expected, _ = run(tmp_path / f"{way} {kind}", "env")
    found, said = run(
        tmp_path / f"{way} {kind} shared", sys.executable, "-m", "wanshim", "generate", "--gpus", "2", "--"
    )
    assert all(map(torch.equal, expected, found))
    assert "WanPipeline on cpu, cpu: guidance over 2, bit for bit the frames of one GPU" in said, said
    assert "left to the framework" not in said.replace("one GPU: the guidance scale switches guidance off", ""), said


def test_offload_layer_by_layer_leaves_a_copy_its_weights() -> None:
    from wanshim.adapters.diffusers import offload

    pipe = wan_pipelines.wan()
    expected = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    offloading.WAYS["sequential"](pipe)
    assert {value.device.type for value in pipe.transformer.parameters()} == {"meta"}
    assert offload.is_offloaded(pipe.transformer)
    assert offload.why_not_carried(pipe.transformer) == ""
    with offload.without_hooks(pipe.transformer):
        found = pipe.transformer.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not offload.is_offloaded(pipe.transformer)
    assert {value.device.type for value in pipe.transformer.parameters()} == {"meta"}
    assert offload.is_offloaded(pipe.transformer)


def test_worker_without_room_streams_from_call_to_call(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Also what changes between calls: adapters are added, and all weights are other tensors."""
    pipe = wan_pipelines.wan()
    pipe.register_modules(transformer=wan_pipelines._dit(num_layers=6, ffn_dim=8192))
    offloading.WAYS["block"](pipe)

    def call(**changed: Any) -> torch.Tensor:
        return wan_pipelines.generate(pipe, "wan", **changed)

    expected = [call(prompts=2), call(num_frames=9)]
    monkeypatch.setattr(shared_pipeline.SharedPipeline, "used_by_worker", lambda *_, **__: 0)
    monkeypatch.setattr(shared_pipeline, "available_bytes", lambda device: 8 * 2**20)
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    assert all(map(torch.equal, expected, [call(prompts=2), call(num_frames=9)]))
    assert handle.plan.streamed
    assert "the others stream blocks of its models from host memory" in str(handle.plan)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    for parameter in pipe.transformer.parameters():
        parameter.data = parameter.data * 1.01
    found = [call(), call()]
    handle.remove()
    assert all(torch.equal(each, call()) for each in found)


def test_what_is_moved_in_another_way_is_named() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    from wanshim.adapters.diffusers import offload

    model = wan_pipelines.wan().transformer
    add_hook_to_module(model.blocks[1], ModelHook())
    assert offload.why_not_carried(model) == "(blocks.1) is moved by accelerate (ModelHook, as of device_map)"


@pytest.mark.parametrize("first", ["forward", "offload"])
@pytest.mark.parametrize("way", ["model", "block"])
def test_forward_of_the_program_s_own_is_seen_beneath_its_offload(way: str, first: str) -> None:
    pipe = wan_pipelines.wan()
    part = pipe.transformer.blocks[0]
    own = part.forward
    if first == "offload":
        offloading.WAYS[way](pipe)
        own = part.forward
    part.forward = lambda *args, **kwargs: own(*args, **kwargs)
    if first == "forward":
        offloading.WAYS[way](pipe)
    with pytest.raises(ModelInvalid, match=r"\(blocks.0\) has a forward of its own"):
        wanshim.parallelize_pipeline(pipe, gpus=2)


def test_pipeline_without_a_vae_shares_its_forwards(request: pytest.FixtureRequest) -> None:
    pipe = wan_pipelines.wan()
    latents = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    changed = {"latents": latents, "output_type": "latent"}
    pipe.register_modules(vae=None)
    expected = wan_pipelines.generate(pipe, "wan", **changed)
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    assert torch.equal(wan_pipelines.generate(pipe, "wan", **changed), expected)
    assert handle.plan.guidance == 2
