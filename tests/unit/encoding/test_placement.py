from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from wanshim.core.encoding import EncoderPlan, choose_device, plan_encoder, read_checkpoint
from wanshim.core.encoding.placement import Checkpoint
from wanshim.errors import EncodingInvalid

UMT5_XXL = Checkpoint(elements=5_680_910_336, dtype=torch.bfloat16)
GB = 10**9
GPU0, GPU1, GPU2 = (torch.device("cuda", i) for i in range(3))


def plan(free: int = 80 * GB, device: torch.device = GPU0) -> EncoderPlan:
    return plan_encoder(UMT5_XXL, compute_dtype=torch.float32, device=device, why="by test", free_bytes=lambda _: free)


def test_plan_encoder_that_fits_is_whole_on_the_own_device() -> None:
    assert str(plan()) == ("encoder (22.7 GB in float32) on cuda:0, whole: by test; 80.0 GB free")


def test_plan_encoder_that_does_not_fit_goes_layer_by_layer_in_the_checkpoints_dtype() -> None:
    assert str(plan(free=10 * GB)) == (
        "encoder (22.7 GB in float32) on cuda:0, layer by layer from bfloat16 on the host: by test; only 10.0 GB free"
    )


def test_plan_encoder_wider_checkpoint_rests_in_the_configured_precision() -> None:
    found = plan_encoder(
        Checkpoint(UMT5_XXL.elements, torch.float32),
        compute_dtype=torch.bfloat16,
        device=GPU0,
        why="by test",
        free_bytes=lambda device: 5 * GB,
    )
    assert (found.residence, found.resident_dtype, found.weight_bytes) == (
        "layers",
        torch.bfloat16,
        11361820672,
    )


def test_plan_encoder_on_cpu_asks_for_no_gpu_memory() -> None:
    assert plan(free=0, device=torch.device("cpu")).residence == "whole"


def test_plan_encoder_full_gpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(EncodingInvalid, match=r"1\.0 GB free.*WANSHIM_ENCODE_ON=cpu"):
        plan(free=1 * GB)


def choose(where: str, local: torch.device = GPU0, *free: int) -> torch.device:
    return choose_device(where, local, lambda: dict(zip((GPU0, GPU1, GPU2), free, strict=True)))[0]


@pytest.mark.parametrize(
    ("where", "expected"), [("auto", "cuda:1"), ("local", "cuda:1"), ("cpu", "cpu"), ("cuda:2", "cuda:2")]
)
def test_choose_device_takes_what_is_asked_for(where: str, expected: str) -> None:
    assert choose(where, GPU1) == torch.device(expected)


def test_choose_device_most_free_takes_that_gpu() -> None:
    assert choose("most_free", GPU0, 20 * GB, 70 * GB, 30 * GB) == GPU1


def test_choose_device_most_free_prefers_the_own_gpu_on_a_tie() -> None:
    assert choose("most_free", GPU1, 70 * GB, 70 * GB, 70 * GB) == GPU1


def test_choose_device_most_free_without_a_gpu_is_the_cpu() -> None:
    assert choose("most_free", torch.device("cpu")) == torch.device("cpu")


def test_choose_device_unknown_place_is_refused() -> None:
    with pytest.raises(EncodingInvalid, match=r"'fridge' names no place.*most_free"):
        choose("fridge")


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
