"""A modular pipeline of Wan over two processes: frames are those of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import wanshim
from tests.contract import scripts
from wanshim.adapters.diffusers.generate import _loops
from wanshim.errors import FeatureUnavailable, ModelInvalid

pytest.importorskip("diffusers.modular_pipelines.wan.modular_blocks_wan22")
from tests.contract.diffusers import modular


def test_frames_are_those_of_one_process(request: pytest.FixtureRequest) -> None:
    pipe = modular.made("wan22")
    expected = [modular.generate(pipe), modular.generate(pipe, num_frames=9)]
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    assert all(map(torch.equal, expected, [modular.generate(pipe), modular.generate(pipe, num_frames=9)]))
    assert handle.plan.guidance == 2


def test_guider_whose_forwards_are_not_known_is_named() -> None:
    from diffusers import SkipLayerGuidance

    pipe = modular.made("wan")
    pipe.update_components(guider=SkipLayerGuidance(skip_layer_guidance_layers=[0]))
    with pytest.raises(ModelInvalid, match="its guider is SkipLayerGuidance, whose forwards of a step are not known"):
        wanshim.parallelize_pipeline(pipe, gpus=2)


def test_block_of_the_program_in_the_loop_is_named() -> None:
    """It may read the result of the first forward before the second."""
    from diffusers.modular_pipelines.wan.denoise import WanLoopDenoiser

    pipe = modular.made("wan")
    loops = [*_loops(pipe._blocks)]
    assert loops
    loops[0].sub_blocks["denoiser"] = type("Reads", (WanLoopDenoiser,), {})()
    with pytest.raises(ModelInvalid, match="the loop of its denoising has blocks that are not diffusers': Reads"):
        wanshim.parallelize_pipeline(pipe, gpus=2)


def test_guider_of_some_steps_leaves_guidance_to_one_gpu(request: pytest.FixtureRequest) -> None:
    from diffusers import ClassifierFreeGuidance

    pipe = modular.made("wan")
    pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=5.0, stop=0.5))
    expected = modular.generate(pipe)
    handle = wanshim.parallelize_pipeline(pipe, gpus="cfg:2")
    request.addfinalizer(handle.remove)
    assert torch.equal(modular.generate(pipe), expected)
    assert "its guiders guide some steps alone" in str(handle.plan)


def test_under_strict_another_guider_stops_before_the_denoising(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import SkipLayerGuidance

    monkeypatch.setenv("WANSHIM_GENERATE", "2")
    wanshim.activate(strict=True)
    pipe = modular.made("wan")
    pipe.update_components(guider=SkipLayerGuidance(skip_layer_guidance_layers=[0]))
    with pytest.raises(FeatureUnavailable, match="WanModularPipeline would run on one GPU: its guider is SkipLayer"):
        modular.generate(pipe)


@pytest.mark.slow
def test_script_has_its_frames_by_one_command(tmp_path: Path) -> None:
    pipe = modular.made("wan")
    expected = [modular.generate(pipe), modular.generate(pipe, num_frames=9)]
    found, said = scripts.run(tmp_path / "shared", modular.__name__, "wan", behind=scripts.generate(2))
    assert all(map(torch.equal, found, expected))
    assert "WanModularPipeline on cpu, cpu: guidance over 2" in said
    assert "diffusers.generate exercised, 2 calls" in said
