"""S2V with gradient checkpointing: DiffSynth's own crash, and the gradients without it."""

from __future__ import annotations

import pytest
import torch

import wanshim
from tests.contract.diffsynth import variants
from tests.contract.diffsynth.stages import stage_devices
from tests.contract.diffsynth.variant_steps import step

FEATURE = "diffsynth.s2v_checkpointing"


def test_s2v_checkpointing_crashes_without_the_feature() -> None:
    """The day this fails, upstream has fixed it and the feature can go."""
    wanshim.activate("none")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(variants.tiny("s2v"), use_gradient_checkpointing=True)


@pytest.mark.parametrize("stages", [0, 2, 4])
def test_s2v_checkpointing_gives_the_gradients_of_no_checkpointing(stages: int) -> None:
    expected = step(variants.tiny("s2v"), use_gradient_checkpointing=False)
    wanshim.activate(f"none,{FEATURE}")
    made = variants.tiny("s2v")
    if stages:
        variants.split(made, stage_devices("cpu", stages))
    found = step(made, use_gradient_checkpointing=True)
    assert all(map(torch.equal, expected, found))
    assert wanshim.report().row(FEATURE).state == "exercised"


def test_s2v_checkpointing_is_a_repair_that_auto_selects() -> None:
    wanshim.activate("auto")
    assert wanshim.report().row(FEATURE).state in ("applied", "exercised", "registered")
