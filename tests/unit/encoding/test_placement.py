from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from wanshim.core.encoding import EncoderPlan, plan_encoder, read_checkpoint
from wanshim.core.encoding.placement import Checkpoint
from wanshim.errors import EncodingInvalid

UMT5_XXL = Checkpoint(elements=5_680_910_336, dtype=torch.bfloat16)
GB = 10**9
GPU0, GPU1, GPU2 = (torch.device("cuda", i) for i in range(3))


def plan(where: str = "auto", free: int = 80 * GB, **changes: object) -> EncoderPlan:
    arguments = {
        "compute_dtype": torch.float32,
        "where": where,
        "local": GPU0,
        "free_bytes": lambda device: free,
        **changes,
    }
    return plan_encoder(UMT5_XXL, **arguments)  # type: ignore[arg-type]


def test_plan_encoder_that_fits_is_whole_on_the_own_device() -> None:
    assert str(plan()) == (
        "encoder (22.7 GB in float32) on cuda:0, whole: the rank's own device; 80.0 GB free"
    )


def test_plan_encoder_that_does_not_fit_goes_layer_by_layer_in_the_checkpoints_dtype() -> None:
    assert str(plan(free=10 * GB)) == (
        "encoder (22.7 GB in float32) on cuda:0, layer by layer from bfloat16 on the host: "
        "the rank's own device; only 10.0 GB free"
    )


def test_plan_encoder_wider_checkpoint_rests_in_the_configured_precision() -> None:
    found = plan_encoder(
        Checkpoint(UMT5_XXL.elements, torch.float32),
        compute_dtype=torch.bfloat16,
        where="auto",
        local=GPU0,
        free_bytes=lambda device: 5 * GB,
    )
    assert (found.residence, found.resident_dtype, found.weight_bytes) == (
        "layers",
        torch.bfloat16,
        11361820672,
    )


def test_plan_encoder_on_cpu_asks_for_no_gpu_memory() -> None:
    def refuse(device: torch.device) -> int:
        raise AssertionError("asked a GPU")

    found = plan("cpu", free_bytes=refuse)
    assert (found.device, found.residence) == (torch.device("cpu"), "whole")


def test_plan_encoder_most_free_takes_that_gpu() -> None:
    found = plan("most_free", peers={GPU0: 20 * GB, GPU1: 70 * GB, GPU2: 30 * GB})
    assert (found.device, found.residence) == (GPU1, "whole")


def test_plan_encoder_most_free_prefers_the_own_gpu_on_a_tie() -> None:
    found = plan("most_free", local=GPU1, peers={GPU0: 70 * GB, GPU1: 70 * GB, GPU2: 70 * GB})
    assert found.device == GPU1


def test_plan_encoder_named_device_is_taken() -> None:
    assert plan("cuda:2").device == GPU2


def test_plan_encoder_unknown_place_is_refused() -> None:
    with pytest.raises(EncodingInvalid, match=r"'fridge' names no place.*most_free"):
        plan("fridge")


def test_plan_encoder_full_gpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(EncodingInvalid, match=r"1\.0 GB free.*WANSHIM_ENCODE_ON=cpu"):
        plan(free=1 * GB)


def test_read_checkpoint_counts_elements_and_the_commonest_dtype(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {"a": torch.zeros(10, 10, dtype=torch.bfloat16), "b": torch.zeros(3)}, tmp_path / "1.safetensors"
    )
    safetensors.torch.save_file({"c": torch.zeros(7)}, tmp_path / "2.safetensors")
    assert read_checkpoint(tmp_path, default=torch.float32) == Checkpoint(110, torch.bfloat16)


def test_read_checkpoint_of_a_pickled_one_counts_bytes_unopened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 400)
    assert read_checkpoint(tmp_path, default=torch.float32) == Checkpoint(100, torch.float32)


def test_read_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EncodingInvalid, match="no weights"):
        read_checkpoint(tmp_path, default=torch.float32)
