"""Weights counted before they are loaded: what fits, what would fit otherwise, and which side models leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanshim.core.shared.safetensors_header import Elements, Header
from wanshim.core.strategy.loading import StoredModel, check_weights, moves_for_weights
from wanshim.errors import PlacementInvalid

GIB = 2**30
DEVICES = ("cuda:0", "cuda:1")
# In two bytes, blocks of 2 GiB and 1 GiB outside them; in one byte, blocks of 1 GiB.
MODEL = StoredModel(
    name="dit.safetensors",
    header=Header((Elements(matrices=GIB),) * 4, Elements(rest=GIB // 2)),
    itemsize=2,
    matrix_itemsize=2,
    devices=DEVICES,
    split_at=(3,),
    split_at_source="AT=3",
    words={"low_precision": "fp8", "stream": ", or stream"},
)


def available(gib: float) -> dict[str, int]:
    return dict.fromkeys(DEVICES, int(gib * GIB))


def test_weights_are_counted_by_stage_and_those_that_just_fit_are_loaded() -> None:
    assert MODEL.bytes_by_device == {"cuda:0": 7 * GIB, "cuda:1": 2 * GIB}
    check_weights(MODEL, available(7))


@pytest.mark.parametrize(
    ("model", "gib", "hint"),
    [
        (MODEL, 5, "What would fit: without AT=3: balanced by bytes; fp8; fp8, without AT=3."),
        (MODEL, 4, "What would fit: fp8; fp8, without AT=3."),
        (MODEL, 3, "What would fit: fp8, without AT=3."),
        (MODEL, 2, "Use more GPUs, or stream."),
        (replace(MODEL, words={}), 4, "What would fit: an fp8 base; an fp8 base, without AT=3."),
        (replace(MODEL, words={}), 2, "Use more GPUs."),
        (replace(MODEL, split_at=None), 4, "What would fit: fp8."),
        (replace(MODEL, matrix_itemsize=1), 3, "What would fit: without AT=3: balanced by bytes."),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_what_would(model: StoredModel, gib: float, hint: str) -> None:
    with pytest.raises(PlacementInvalid) as caught:
        check_weights(model, available(gib))
    needed = model.bytes_by_device["cuda:0"] / GIB
    assert f"were not loaded: cuda:0 would need {needed:.2f} GiB of {gib:.2f} GiB" in str(caught.value)
    assert "by the header of dit.safetensors" in str(caught.value)
    assert str(caught.value).endswith(hint)


def test_side_models_leave_before_weights_that_would_not_fit_beside_them() -> None:
    blocks, side = [2 * GIB] * 4, {"text_encoder": 3 * GIB, "vae": GIB}
    moves, notes = moves_for_weights(blocks, GIB, DEVICES, None, side, available(7))
    assert moves == {"text_encoder": "cuda:1"}
    assert notes == (
        "text_encoder (3.00 GiB) computes on cuda:1, with the same bits: beside it cuda:0 would need 9.00 GiB of "
        "7.00 GiB",
    )
    assert moves_for_weights(blocks, GIB, DEVICES, (1,), side, available(7)) == ({}, ())
    assert moves_for_weights(blocks, GIB, DEVICES, None, side, {}) == ({}, ())
    host, _ = moves_for_weights(blocks, GIB, DEVICES, (3,), {"text_encoder": 3 * GIB}, {"cuda:0": 10 * GIB - 1})
    assert host == {"text_encoder": "cuda:1"}  # which has no limit
