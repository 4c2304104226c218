"""`diffusers.generate` over four processes: guidance over two halves, and the tokens of each forward over a half."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.contract.diffusers import wan_pipelines
from tests.contract.diffusers.uneven_heads import five_heads_on_one_thread
from tests.contract.diffusers.wan_pipelines import generate
from wanshim.adapters.diffusers.generate import bind
from wanshim.core.generation import Request, SharedPipeline
from wanshim.core.sequence.exchange import Passage

pytestmark = pytest.mark.timeout(600)  # a worker imports torch and diffusers


@pytest.fixture(autouse=True, scope="module")
def _five_heads_on_one_thread() -> Iterator[None]:
    with five_heads_on_one_thread(wan_pipelines.TRANSFORMER):
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPipeline]:
    made = SharedPipeline(Request(gpus=4))
    yield made
    made.close()


def compare(shared: SharedPipeline, pipe: Any, kind: str, way: tuple[int, int], **changed: Any) -> None:
    shared.request = Request(gpus=4, at_most=way)
    expected = generate(pipe, kind, **changed)
    before, calls = shared.shared_forwards, shared.shared_vae_calls
    found = shared.run(partial(bind, pipe), partial(generate, pipe, kind, **changed))
    assert shared.plan is not None
    assert (shared.plan.guidance, shared.plan.sequence) == way
    assert shared.shared_forwards > before
    assert shared.shared_vae_calls > calls
    assert (found - expected).abs().max() <= 1e-5
    assert torch.equal(expected, generate(pipe, kind, **changed)), "nothing is left in the model"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in wan_pipelines.MADE if kind != "animate"])
def test_guidance_and_tokens_over_four_processes(shared: SharedPipeline, kind: str) -> None:
    compare(shared, wan_pipelines.MADE[kind](), kind, (2, 2))


@pytest.mark.parametrize("way", [(1, 2), (1, 3), pytest.param((1, 4), marks=pytest.mark.slow)], ids=str)
def test_tokens_without_guidance_at_odd_sizes(shared: SharedPipeline, way: tuple[int, int]) -> None:
    pipe = wan_pipelines.wan()
    compare(shared, pipe, "wan", way, guidance_scale=1.0, height=48, width=80, num_frames=9)
    compare(shared, pipe, "wan", way, guidance_scale=1.0, prompts=2)


@pytest.mark.parametrize("wrong", [float("nan"), 100.0])
@pytest.mark.parametrize("way", [(1, 2), (2, 2)], ids=str)
def test_tokens_that_come_to_other_values_stay_in_one_process(
    way: tuple[int, int], wrong: float, shared: SharedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = {"guidance_scale": 5.0 if way[0] == 2 else 1.0, "height": 48, "width": 80, "num_frames": 9}
    pipe, arrive = wan_pipelines.wan(), Passage.arrive

    def lost(passage: Passage, x: torch.Tensor) -> None:
        arrive(passage, x)
        x.fill_(wrong)

    expected = generate(pipe, "wan", **video)
    shared.request = Request(gpus=4, at_most=way)
    with monkeypatch.context() as planted:
        planted.setattr(Passage, "arrive", lost)
        assert torch.equal(shared.run(partial(bind, pipe), partial(generate, pipe, "wan", **video)), expected)
    assert shared.plan is not None
    assert shared.plan.gpus == 1
    assert any("more than rounding" in reason for reason in shared.plan.rejected.values())
    compare(shared, pipe, "wan", way, **video)


def test_lora_goes_with_the_tokens(shared: SharedPipeline) -> None:
    from peft import LoraConfig

    pipe = wan_pipelines.wan()
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), "one")
    compare(shared, pipe, "wan", (2, 2))
    pipe.transformer.set_adapters(["one"], [0.3])
    compare(shared, pipe, "wan", (2, 2))


def test_guidance_alone_on_the_same_workers_is_bit_for_bit(shared: SharedPipeline) -> None:
    pipe = wan_pipelines.wan()
    expected = generate(pipe, "wan")
    shared.request = Request(gpus=4, at_most=(2, 1))
    assert torch.equal(expected, shared.run(partial(bind, pipe), partial(generate, pipe, "wan")))


def dropping(model: Any) -> None:
    model.blocks[1].ffn.net[1] = torch.nn.Dropout(0.1)


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("animate", lambda model: None, "WanAnimateTransformer3DModel: what works between its blocks sees all tokens"),
        ("wan", lambda model: model.blocks[1].attn1.fuse_projections(), "the projections of WanTransformer3DModel"),
        ("wan", lambda model: setattr(model.blocks[0].attn1, "processor", str), "is type, which is not known"),
        ("wan", dropping, "WanTransformerBlock 1 draws random numbers"),
    ],
    ids=["animate", "fused", "processor", "dropout"],
)
def test_what_cannot_go_over_processes_is_named(kind: str, change: Any, text: str) -> None:
    pipe = wan_pipelines.MADE[kind]()
    change(pipe.transformer)
    assert text in bind(pipe).no_sequence
