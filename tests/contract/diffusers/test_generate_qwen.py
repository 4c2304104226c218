"""`diffusers.generate` of Qwen-Image: its guidance over two processes has the images of one, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import wanshim
from tests.contract.diffusers import qwen_pipelines
from tests.contract.diffusers.qwen_pipelines import generate, qwen
from wanshim.adapters.diffusers.generate import bind
from wanshim.core.generation import SharedPipeline
from wanshim.errors import ModelInvalid

pytestmark = pytest.mark.timeout(600)  # a worker imports torch and diffusers


@pytest.fixture(autouse=True, scope="module")
def _small_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        qwen_pipelines.small_pictures(patch)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def parallelized() -> Iterator[tuple[Any, Any]]:
    pipe = qwen()
    handle = wanshim.parallelize_pipeline(pipe, gpus=2)
    yield pipe, handle
    handle.remove()


@pytest.fixture(scope="module")
def shared(parallelized: tuple[Any, Any]) -> SharedPipeline:
    """One worker for pipelines of every class: it holds whatever the last call had."""
    made: SharedPipeline = parallelized[1]._shared
    return made


def run(shared: SharedPipeline, pipe: Any, kind: str = "text", **changed: Any) -> torch.Tensor:
    """One call over two processes, with the arguments that it was bound with."""

    class Calls:
        def __call__(self, **given: Any) -> Any:
            return shared.run(partial(bind, pipe, **given), partial(pipe, **given))

    return generate(Calls(), kind, **changed)


def compare(shared: SharedPipeline, pipe: Any, kind: str = "text", forwards: int = 3, **changed: Any) -> None:
    expected, before = generate(pipe, kind, **changed), shared.shared_forwards
    assert torch.equal(expected, run(shared, pipe, kind, **changed))
    assert shared.shared_forwards - before == forwards


@pytest.mark.parametrize("kind", qwen_pipelines.KINDS)
def test_images_of_two_processes_are_those_of_one(shared: SharedPipeline, kind: str) -> None:
    pipe = qwen(kind)
    forwards = 2 if kind in ("img2img", "inpaint", "edit_inpaint") else 3  # of three steps, at strength 0.6
    compare(shared, pipe, kind, forwards)
    assert shared.plan is not None
    assert (shared.plan.guidance, shared.plan.sequence) == (2, 1)
    compare(shared, pipe, kind, forwards)
    assert "forward" not in vars(pipe.transformer)


@pytest.mark.parametrize(
    "changed",
    [
        {"prompts": 2},
        {"num_images_per_prompt": 2},
        {"height": 48, "width": 64},
        {"negative_prompt_embeds_mask": torch.tensor([[1, 1, 1, 0, 0]])},
        {"negative_prompt_embeds_mask": None},
        {"attention_kwargs": {"scale": 1.0}},
    ],
    ids=["two prompts", "two images", "size", "padded", "no mask", "attention_kwargs"],
)
def test_any_batch_and_size_has_the_same_images(shared: SharedPipeline, changed: dict[str, Any]) -> None:
    if "negative_prompt_embeds_mask" in changed:
        qwen_pipelines.skip_mask_of_later_releases(changed["negative_prompt_embeds_mask"])
    compare(shared, qwen(), **changed)


def test_decode_goes_over_the_processes_where_the_image_is_large_enough(shared: SharedPipeline) -> None:
    before = shared.shared_vae_calls
    compare(shared, qwen(), height=64, width=64)
    assert shared.shared_vae_calls - before == 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"negative_prompt_embeds": None, "negative_prompt_embeds_mask": None}, "no negative prompt is given"),
        ({"true_cfg_scale": 1.0}, "true_cfg_scale switches guidance off"),
    ],
    ids=["no negative prompt", "scale 1"],
)
def test_without_guidance_it_is_the_tokens_and_the_plan_says_why(
    shared: SharedPipeline, changed: dict[str, Any], reason: str
) -> None:
    pipe = qwen()
    expected = generate(pipe, **changed)
    assert (expected - run(shared, pipe, **changed)).abs().max() <= 1e-5
    assert shared.plan is not None
    assert (shared.plan.guidance, shared.plan.sequence) == (1, 2)
    assert reason in shared.plan.rejected["guidance over 2"]


def test_callback_that_changes_latents_has_the_same_images(shared: SharedPipeline) -> None:
    def callback(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {"latents": given["latents"] * (1 + step)}

    compare(shared, qwen(), callback_on_step_end=callback)


def test_lora_goes_to_the_worker(shared: SharedPipeline) -> None:
    from peft import LoraConfig

    pipe = qwen()
    plain = generate(pipe)
    targets = ["to_q", "add_k_proj", "proj_out"]
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), "one")
    assert not torch.equal(plain, generate(pipe))
    compare(shared, pipe)
    pipe.transformer.set_adapters(["one"], [0.3])
    compare(shared, pipe)


def test_a_parallelized_pipeline_has_the_same_images(parallelized: tuple[Any, Any]) -> None:
    pipe, handle = parallelized
    assert torch.equal(generate(qwen()), generate(pipe))
    assert "guidance over 2, bit for bit the frames of one GPU" in str(handle.plan)


def test_controlnet_is_refused_by_name() -> None:
    import diffusers

    pipe = qwen()
    parts = {name: getattr(pipe, name) for name in ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")}
    controlled = diffusers.QwenImageControlNetPipeline(**parts, controlnet=None)
    with pytest.raises(ModelInvalid, match=r"QwenImageControlNetPipeline is none of WanPipeline, .*QwenImageEdit"):
        wanshim.parallelize_pipeline(controlled, gpus=2)
