"""LoRA on a base of `--fp8_models`: DiffSynth's own loses every gradient, and the gradients with the repair."""

from __future__ import annotations

import pytest
import torch
from diffsynth.core.vram import layers

import wanshim
from tests.contract.diffsynth.fp8_models import FP8, OWNERS, step, with_lora
from wanshim.adapters.diffsynth import fp8_lora
from wanshim.core.model_split import split_model

FEATURE = "diffsynth.fp8_lora"
COPIES_EVERY_BLOCK = hasattr(layers.AutoWrappedNonRecurseModule, "_copy_with_shared_children")


@pytest.fixture(autouse=True)
def _cache_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """DiffSynth empties the cache of whatever device it runs on, and the host has none."""
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)


@pytest.mark.parametrize("name", OWNERS)
def test_fp8_lora_without_the_feature_gets_no_gradient(name: str) -> None:
    """The day this fails, upstream has fixed it and the feature can go."""
    wanshim.activate("none")
    _, gradients = step(*with_lora(name, managed=True), False)
    lost = name != "t2v" or COPIES_EVERY_BLOCK
    in_blocks = [gradient for path, gradient in gradients.items() if path.startswith(("blocks.", "vace_blocks."))]
    assert len(in_blocks) >= 80
    assert {gradient is None for gradient in in_blocks} == {lost}


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic_kernels")
@pytest.mark.parametrize(
    "checkpointing", [pytest.param(False, marks=pytest.mark.sweep), True], ids=["keep", "checkpoint"]
)
@pytest.mark.parametrize("name", OWNERS)
def test_fp8_lora_gives_the_gradients_of_the_same_base_dequantised(name: str, checkpointing: bool) -> None:
    if name == "s2v" and checkpointing:
        wanshim.activate(f"none,{FEATURE},diffsynth.s2v_checkpointing")
    else:
        wanshim.activate(f"none,{FEATURE}")
    loss, expected = step(*with_lora(name, managed=False), checkpointing)
    made, owner = with_lora(name, managed=True)
    found_loss, found = step(made, owner, checkpointing)
    assert torch.equal(found_loss, loss)
    assert found.keys() == expected.keys()
    assert all(gradient.any() for gradient in expected.values())
    assert all(torch.equal(found[path], gradient) for path, gradient in expected.items())
    assert FP8 in {parameter.dtype for parameter in owner.parameters()}
    assert wanshim.report().row(FEATURE).state == "exercised"


@pytest.mark.skipif(not COPIES_EVERY_BLOCK, reason="this release casts no copies of whole blocks")
def test_block_keeps_its_modules_while_a_copy_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may compute with it then."""
    wanshim.activate(f"none,{FEATURE}")
    made, owner = with_lora("t2v", managed=True)
    names = {name for name, _ in owner.named_modules()}
    restore, seen = layers.AutoWrappedNonRecurseModule._restore_shared_children, []

    def look(self: object, detached: list[object]) -> None:
        seen.append({name for name, _ in owner.named_modules()})
        restore(self, detached)

    monkeypatch.setattr(layers.AutoWrappedNonRecurseModule, "_restore_shared_children", look)
    step(made, owner, False)
    assert seen
    assert all(found == names for found in seen)


def test_fp8_lora_in_another_dtype_keeps_it_and_its_place_in_the_model() -> None:
    wanshim.activate(f"none,{FEATURE}")
    made, owner = with_lora("s2v", managed=True)
    trained = {name: p for name, p in owner.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data = parameter.data.float()
    _, gradients = step(made, owner, False)
    assert {p.dtype for p in trained.values()} == {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert {name: p for name, p in owner.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("name", ["t2v", "s2v"])
@pytest.mark.parametrize("active", [False, True], ids=["off", "on"])
def test_fp8_lora_under_a_split_trains_with_the_feature_on_and_off(name: str, active: bool) -> None:
    from wanshim.adapters.diffsynth.splitting import low_precision as quantized_base

    wanshim.activate(f"none,{FEATURE}" if active else "none")
    _, expected = step(*with_lora(name, managed=False), False)
    made, owner = with_lora(name, managed=True)
    handle = split_model(owner, ["cpu", "cpu"], blocks="blocks", exits=("head",))
    assert quantized_base.place_wrappers(handle)
    _, found = step(made, owner, False)
    assert all(torch.equal(found[path], gradient) for path, gradient in expected.items())
    if active:
        assert wanshim.report().row(FEATURE).state == "exercised"
    handle.remove()
    assert not any({"cast_to", "_copy_with_shared_children"} & vars(module).keys() for module in owner.modules())


@pytest.mark.parametrize("name", OWNERS)
def test_generation_casts_what_is_set_to_be_trained_as_diffsynth_does(name: str) -> None:
    """`from_pretrained` leaves all so, and nobody has frozen it."""
    made, owner = with_lora(name, managed=True)
    for parameter in owner.parameters():
        parameter.requires_grad_()
    with torch.no_grad():
        expected = made()
        wanshim.activate(f"none,{FEATURE}", strict=True)
        assert torch.equal(made(), expected)


@pytest.mark.parametrize("gradients", [False, True])
def test_lora_beside_frozen_weights_is_shared_without_gradients_too(gradients: bool) -> None:
    """A reentrant checkpoint computes its first forward so."""
    _, owner = with_lora("s2v", managed=False)
    block = owner.blocks[0]
    assert [p for p in block.parameters() if not p.requires_grad]
    with torch.set_grad_enabled(gradients):
        found = fp8_lora.training_in(block)
    assert {id(p) for m in found for p in m.parameters(recurse=False)} == {
        id(p) for p in block.parameters() if p.requires_grad
    }


def test_fp8_lora_is_a_repair_that_auto_selects() -> None:
    wanshim.activate("auto")
    assert wanshim.report().row(FEATURE).state in ("applied", "exercised", "registered")
