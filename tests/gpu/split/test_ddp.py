"""DDP over splits on NCCL: two processes with two GPUs each train what one process trains on the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.diffsynth.test_split_ddp import trained

ON_GPU = {"ON_GPU": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.gpu(4)
def test_ddp_over_splits_on_four_gpus_trains_as_one_process_with_the_same_global_batch(tmp_path: Path) -> None:
    """Eight samples in global batches of two: one process that accumulates two micro-batches, plain DDP, DDP over
    splits. The file is plain DDP's bit for bit; the gradients are the one process's but for the order of a sum."""
    _, (alone,) = trained(tmp_path / "one", 2, 1, **ON_GPU)
    plain, ranks = trained(tmp_path / "plain", 1, 2, **ON_GPU)
    split, halves = trained(tmp_path / "split", 1, 2, WANSHIM_DEVICES="cuda:0,cuda:1,cuda:2,cuda:3", **ON_GPU)
    assert sorted(alone["seen"]) == sorted(number for rank in halves for number in rank["seen"])
    assert [rank["seen"] for rank in halves] == [rank["seen"] for rank in ranks]
    assert all(any("split into 2 stages" in note for note in rank["notes"]) for rank in halves)
    assert split == plain
    expected, found = (load_file(tmp_path / job / "gradients") for job in ("one", "split"))
    assert expected.keys() == found.keys()
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)  # one unit in the last place of bf16


@pytest.mark.gpu(4)
def test_lanes_in_ddp_over_splits_on_four_gpus_write_the_file_of_plain_ddp(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "plain", 2, 2, **ON_GPU)
    split, ranks = trained(tmp_path / "split", 2, 2, WANSHIM_DEVICES="cuda:0,cuda:1,cuda:2,cuda:3", **ON_GPU)
    assert all(any("2 micro-batches in 2 lanes" in note for note in rank["notes"]) for rank in ranks)
    assert split == plain
