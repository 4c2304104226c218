"""A step cache of diffusers on a pipeline that is shared: the frames of the same cache on one GPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import wanshim
from tests.contract.diffusers import wan_pipelines
from tests.contract.diffusers.wan_pipelines import generate
from wanshim.errors import ModelInvalid

STEPS = 6


def first_block() -> Any:
    from diffusers import FirstBlockCacheConfig

    return FirstBlockCacheConfig(threshold=0.3)


def magnitude() -> Any:
    hooks = pytest.importorskip("diffusers.hooks.mag_cache", reason="this release has no MagCache")
    ratios = torch.linspace(1, 0.9, STEPS)
    return hooks.MagCacheConfig(num_inference_steps=STEPS, mag_ratios=ratios, threshold=0.5, retention_ratio=0.1)


@pytest.mark.parametrize(
    ("config", "kind"),
    [(first_block, "wan22"), pytest.param(magnitude, "wan", marks=pytest.mark.slow)],
)
def test_frames_are_those_of_the_cache_on_one_gpu(
    config: Callable[[], Any], kind: str, request: pytest.FixtureRequest
) -> None:
    pipe = getattr(wan_pipelines, kind)()
    without = generate(pipe, kind, num_inference_steps=STEPS)
    for model in filter(None, (pipe.transformer, pipe.transformer_2)):
        model.enable_cache(config())
    calls = [{}, {"num_frames": 9}, {"prompts": 2}, {}]
    expected = [generate(pipe, kind, num_inference_steps=STEPS, **each) for each in calls]
    assert not torch.equal(expected[0], without)
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    request.addfinalizer(handle.remove)
    found = [generate(pipe, kind, num_inference_steps=STEPS, **each) for each in calls]
    assert all(map(torch.equal, expected, found))
    assert handle.plan.guidance == 2


def test_cache_runs_by_guidance_alone_and_with_no_callback() -> None:
    pipe = wan_pipelines.wan()
    pipe.transformer.enable_cache(first_block())
    handle = wanshim.parallelize_pipeline(pipe, gpus=4)
    generate(pipe, "wan")
    assert (handle.plan.guidance, handle.plan.sequence) == (2, 1)
    assert handle.plan.rejected["tokens over 4"] == "a step cache skips forwards by what it has of all tokens"
    with pytest.raises(ModelInvalid, match="own between steps may change what a step cache has kept"):
        generate(pipe, "wan", callback_on_step_end=lambda *_: {})
    handle.remove()
