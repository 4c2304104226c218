"""S2V with gradient checkpointing: DiffSynth's own crash, and the gradients without it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import checkpoint

import wanshim
from tests.contract.diffsynth import variants
from tests.contract.diffsynth.stages import stage_devices
from tests.contract.diffsynth.variant_steps import step
from wanshim.errors import WanshimError

FEATURE = "diffsynth.s2v_checkpointing"


def test_s2v_checkpointing_crashes_without_the_feature() -> None:
    """The day this fails, upstream has fixed it and the feature can go."""
    wanshim.activate("none")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(variants.tiny("s2v"), use_gradient_checkpointing=True)


def test_s2v_checkpoints_on_the_host_give_wrong_gradients_without_the_feature() -> None:
    """DiffSynth's own script trains so, silently: every block is computed again as the last one."""
    wanshim.activate("none")
    expected = step(variants.tiny("s2v"), use_gradient_checkpointing=False)
    found = step(variants.tiny("s2v"), use_gradient_checkpointing=True, use_gradient_checkpointing_offload=True)
    assert torch.equal(expected[0], found[0])
    assert not all(map(torch.equal, expected, found))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stages", [0, 2, 4])
def test_s2v_checkpointing_gives_the_gradients_of_no_checkpointing(stages: int, offload: bool) -> None:
    expected = step(variants.tiny("s2v"), use_gradient_checkpointing=False)
    wanshim.activate(f"none,{FEATURE}")
    made = variants.tiny("s2v")
    if stages:
        variants.split(made, stage_devices("cpu", stages))
    found = step(made, use_gradient_checkpointing=True, use_gradient_checkpointing_offload=offload)
    assert all(map(torch.equal, expected, found))
    assert wanshim.report().row(FEATURE).state == "exercised"


def test_s2v_checkpointing_is_a_repair_that_auto_selects() -> None:
    wanshim.activate("auto")
    assert wanshim.report().row(FEATURE).state in ("applied", "exercised", "registered")


def test_s2v_steps_whose_backwards_come_in_any_order_have_their_gradients() -> None:
    """Two forwards before the first backward, the older one first."""
    wanshim.activate(f"none,{FEATURE}")
    found = []
    for checkpointing in (False, True):
        made = variants.tiny("s2v")
        losses = [made(use_gradient_checkpointing=checkpointing).float().pow(2).mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
        found.append([p.grad for model in made.modules().values() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *found))


def test_s2v_under_a_reentrant_checkpoint_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first forward, as that of DeepSpeed's, makes no graph that could say the block."""
    wanshim.activate(f"none,{FEATURE}")
    plain = partial(checkpoint.checkpoint, use_reentrant=True)
    monkeypatch.setattr(checkpoint, "checkpoint", lambda function, *args, **_: plain(function, *args))
    with pytest.raises(WanshimError, match="wrong gradients"):
        step(variants.tiny("s2v"), use_gradient_checkpointing=True)


def test_s2v_blocks_computed_in_other_threads_have_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd numbers the nodes of each thread by themselves."""
    expected = step(variants.tiny("s2v"), use_gradient_checkpointing=False)
    wanshim.activate(f"none,{FEATURE}")
    plain = checkpoint.checkpoint

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(plain, *args, **kwargs).result()

    monkeypatch.setattr(checkpoint, "checkpoint", elsewhere)
    found = step(variants.tiny("s2v"), use_gradient_checkpointing=True)
    assert all(map(torch.equal, expected, found))


def test_s2v_evaluation_in_a_hook_of_backward_is_no_checkpoint_s() -> None:
    wanshim.activate(f"none,{FEATURE}")
    made = variants.tiny("s2v")
    with torch.no_grad():
        expected = made()
    found = []

    def evaluate(_: object) -> None:
        with torch.no_grad():
            found.append(made())

    next(p for p in made.dit.parameters() if p.requires_grad).register_hook(evaluate)
    step(made, use_gradient_checkpointing=True)
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("behind", [torch.clone, torch.exp])
def test_s2v_checkpoint_around_several_blocks_raises(behind: Any) -> None:
    """All of them would be computed again under the number of one."""
    dit = variants.tiny("s2v").dit
    wanshim.activate(f"none,{FEATURE}")
    width = dit.dim
    tokens, sound = torch.randn(1, 4, width, requires_grad=True), torch.randn(1, 2, 1, width)

    def inject(x: torch.Tensor) -> torch.Tensor:
        for number in list(dit.audio_injector.injected_block_id)[:2]:
            x = dit.after_transformer_block(number, x, sound, sound, 4)
        return behind(x)

    result = checkpoint.checkpoint(inject, tokens, use_reentrant=False)
    with pytest.raises(WanshimError, match="wrong gradients"):
        result.pow(2).sum().backward()
