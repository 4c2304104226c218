"""`diffusers.generate` of Qwen-Image over up to four processes: image tokens over them, text whole on each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.contract.diffusers import qwen_pipelines
from tests.contract.diffusers.qwen_pipelines import generate, qwen
from tests.contract.diffusers.uneven_heads import five_heads_on_one_thread
from wanshim.adapters.diffusers import generate as adapter
from wanshim.adapters.diffusers.generate import bind
from wanshim.core.generation import Request, SharedPipeline

pytestmark = pytest.mark.timeout(600)  # a worker imports torch and diffusers
PADDED = torch.tensor([[1, 1, 1, 0, 0]])


@pytest.fixture(autouse=True, scope="module")
def _small_with_five_heads_on_one_thread() -> Iterator[None]:
    with five_heads_on_one_thread(qwen_pipelines.TRANSFORMER) as patch:
        qwen_pipelines.small_pictures(patch)
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPipeline]:
    made = SharedPipeline(Request(gpus=4))
    yield made
    made.close()


def compare(shared: SharedPipeline, pipe: Any, way: tuple[int, int], kind: str = "text", **changed: Any) -> None:
    class Calls:
        def __call__(self, **given: Any) -> Any:
            return shared.run(partial(bind, pipe, **given), partial(pipe, **given))

    shared.request = Request(gpus=4, at_most=way)
    expected, before = generate(pipe, kind, **changed), shared.shared_forwards
    found = generate(Calls(), kind, **changed)
    assert shared.plan is not None
    assert (shared.plan.guidance, shared.plan.sequence) == way
    assert f"tokens over {way[1]}" in str(shared.plan)
    assert shared.shared_forwards > before
    assert (found - expected).abs().max() <= 1e-5
    assert torch.equal(expected, generate(pipe, kind, **changed)), "nothing is left in the model"


@pytest.mark.slow
@pytest.mark.parametrize("kind", qwen_pipelines.KINDS)
def test_guidance_and_tokens_over_four_processes(shared: SharedPipeline, kind: str) -> None:
    compare(shared, qwen(kind), (2, 2), kind)


@pytest.mark.parametrize("way", [(1, 2), (1, 3), (1, 4)], ids=str)
def test_tokens_at_sizes_that_do_not_divide(shared: SharedPipeline, way: tuple[int, int]) -> None:
    """Fifteen tokens and five heads; guidance, whose two prompts have other lengths, one forward after the other."""
    pipe = qwen()
    compare(shared, pipe, way, height=48, width=80)
    compare(shared, pipe, way, height=48, width=80, true_cfg_scale=1.0)
    compare(shared, pipe, way, prompts=2)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [PADDED, None], ids=["padded", "no mask"])
def test_masked_text_has_the_same_images(shared: SharedPipeline, mask: torch.Tensor | None) -> None:
    qwen_pipelines.skip_mask_of_later_releases(mask)
    compare(shared, qwen(), (2, 2), negative_prompt_embeds_mask=mask)
    compare(shared, qwen(), (1, 3), negative_prompt_embeds_mask=mask)


def test_tokens_of_two_timesteps_have_the_same_images(shared: SharedPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures that are edited have the timestep 0: a number a token says which it is."""
    from diffusers import QwenImageTransformer2DModel

    if "zero_cond_t" not in inspect.signature(QwenImageTransformer2DModel).parameters:
        pytest.skip("this diffusers has no zero_cond_t, an argument of 0.37 and later")
    monkeypatch.setitem(qwen_pipelines.TRANSFORMER, "zero_cond_t", True)
    compare(shared, qwen("edit_plus"), (1, 3), "edit_plus")
    compare(shared, qwen("edit_plus"), (2, 2), "edit_plus")  # encoded by the three of before, decoded by four


def test_lora_goes_with_the_tokens(shared: SharedPipeline) -> None:
    from peft import LoraConfig

    pipe = qwen()
    plain = generate(pipe)
    targets = ["to_q", "add_k_proj", "to_out.0", "to_add_out", "proj_out"]
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), "one")
    assert not torch.equal(plain, generate(pipe))
    compare(shared, pipe, (2, 2))


def test_guidance_alone_on_the_same_workers_is_bit_for_bit(shared: SharedPipeline) -> None:
    pipe = qwen()
    expected = generate(pipe)
    shared.request = Request(gpus=4, at_most=(2, 1))
    found = shared.run(partial(bind, pipe, negative_prompt_embeds=0, true_cfg_scale=4.0), partial(generate, pipe))
    assert torch.equal(expected, found)


def test_blocks_of_a_release_that_is_not_known_leave_guidance_alone(
    shared: SharedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{adapter.MODELS}.transformer_qwenimage:QwenImageTransformerBlock.forward"
    adapter._why_no_qwen_blocks.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(adapter.QWEN_BLOCKS, target, ("0" * 16,))
        reason = bind(qwen()).no_sequence
        assert reason == f"{target}: not the code of a release that is known"
        shared.request = Request(gpus=4)
        pipe = qwen()
        expected = generate(pipe)
        given = {"negative_prompt_embeds": 0, "negative_prompt_embeds_mask": 0, "true_cfg_scale": 4.0}
        assert torch.equal(expected, shared.run(partial(bind, pipe, **given), partial(generate, pipe)))
        assert shared.plan is not None
        assert (shared.plan.guidance, shared.plan.sequence) == (2, 1)
        assert shared.plan.rejected["guidance over 2 x tokens over 2"] == reason
    adapter._why_no_qwen_blocks.cache_clear()
    assert bind(qwen()).no_sequence == ""


def test_a_processor_that_is_not_known_is_named() -> None:
    pipe = qwen()
    pipe.transformer.transformer_blocks[1].attn.processor = str
    assert bind(pipe).no_sequence == "the attention of QwenImageTransformer2DModel is type, which is not known"
