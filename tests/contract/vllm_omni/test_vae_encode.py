"""`vllm_omni.vae_encode` on vLLM-Omni's own distributed VAE, and the handle on its encoders."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from tests.contract.vllm_omni.untiled import (
    expect_each_rank_to_compute_for_itself,
    expect_vllm_omnis_bits_in_one_process,
)
from tests.contract.vllm_omni.vae import make_distributed
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.decoding.tiny import QWEN_IMAGE, encode, make_video
from tests.kit.pytest_tests import verdict_here
from wanshim.patching import SourceTree
from wanshim.patching.verdict import Verdict

FEATURE = "vllm_omni.vae_encode"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(verdict_here(FEATURE) is not Verdict.PATCH, reason="this release has no distributed Wan VAE"),
]
TILES = "vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_wan:DistributedAutoencoderKLWan.tiled_encode"
of_tiles = pytest.mark.skipif(
    SourceTree.of_installed("vllm_omni").node(TILES) is None, reason="before 0.20 it is diffusers that makes the tiles"
)


def encode_in_place_of_tiles(rank: int, size: int) -> list[tuple[tuple[str, str, str, bool], bool, float, str, str]]:
    import wanshim

    told = []
    modes = [("auto", False), ("temporal", False), ("spatial", False), ("auto", True)]
    for layout, dtype, (mode, fast) in product(("2.1", "2.2"), ("float32", "bfloat16"), modes):
        if dtype == "bfloat16" and (mode, fast) != ("temporal", False):
            continue
        vae = make_distributed(layout, size, getattr(torch, dtype))
        video = make_video(9, 96, 112, dtype=vae.dtype)
        vae.use_tiling = False
        reference = encode(vae, video)
        vae.use_tiling = True
        os.environ.update(WANSHIM_VAE_ENCODE=mode, WANSHIM_VAE_FAST=str(int(fast)))
        wanshim.activate(f"none,{FEATURE}", strict=True)
        out = encode(vae, video)
        row = wanshim.report().row(FEATURE)
        wanshim.deactivate()
        difference = (out.float() - reference.float()).abs().max().item()
        case = (layout, dtype, mode, fast)
        told.append((case, torch.equal(out, reference), difference, row.state, "; ".join(row.notes)))
    return told


@of_tiles
@pytest.mark.parametrize("size", [2, 3])
def test_tiled_encode_is_exact_on_all_ranks(size: int) -> None:
    for told in values(run_ranks(encode_in_place_of_tiles, size, seconds=500)):
        assert len(told) == 10
        for case, equal, difference, state, notes in told:
            assert state == "exercised", (case, notes)
            assert ("temporal " if case[2] == "temporal" else "spatial ") in notes, (case, notes)
            assert equal if case[2] == "temporal" else difference <= 1e-5, (case, difference)


def encode_without_executor(rank: int, size: int) -> tuple[bool, str]:
    import wanshim

    vae, video = make_distributed("2.1", 1), make_video(5, 96, 112)
    reference = encode(vae, video)
    wanshim.activate(f"none,{FEATURE}", strict=True)
    same = torch.equal(encode(vae, video), reference)
    return same, "; ".join(wanshim.report().row(FEATURE).notes)


@of_tiles
def test_encode_that_vllm_omni_was_not_asked_to_share_is_left_alone_and_reported() -> None:
    for same, notes in values(run_ranks(encode_without_executor, 2)):
        assert same
        assert "left to the framework: vae_patch_parallel_size asks for no parallel VAE" in notes


def encode_in_one_process(rank: int, size: int) -> tuple[bool, str, str]:
    from unittest import mock

    import wanshim
    from wanshim.core.decoding import vae_cache

    vae, video = make_distributed("2.2", size), make_video(5, 96, 112)
    vae.use_tiling = False
    untiled = encode(vae, video)
    vae.use_tiling = True
    wanshim.activate(f"none,{FEATURE}", strict=True)
    with mock.patch.object(vae_cache, "gains_alone", return_value=True):
        same = torch.equal(encode(vae, video), untiled)
    row = wanshim.report().row(FEATURE)
    return same, row.state, "; ".join(row.notes)


@of_tiles
def test_one_gpu_that_was_asked_for_tiles_encodes_the_whole_picture() -> None:
    """A double says that the operators gain there, for there is no GPU here."""
    ((same, state, notes),) = values(run_ranks(encode_in_one_process, 1))
    assert same, notes
    assert state == "exercised"
    assert "on 1 rank, strict, compared" in notes


def encode_by_handle(rank: int, size: int) -> list[tuple[str, bool, str]]:
    from wanshim.core.decoding import parallelize_encode

    told = []
    for layout in ("2.1", "2.2", QWEN_IMAGE):
        vae, video = make_distributed(layout, size), make_video(9, 96, 112)
        vae.use_tiling = False
        reference = encode(vae, video)
        handle = parallelize_encode(vae, mode="temporal")
        told.append((layout, torch.equal(encode(vae, video), reference), str(handle.plan)))
        handle.remove()
    return told


def test_handle_encodes_the_same_latents() -> None:
    for told in values(run_ranks(encode_by_handle, 2)):
        for layout, same, plan in told:
            assert same, (layout, plan)
            assert "temporal on 2 ranks" in plan


def test_one_gpu_without_tiles_encodes_with_vllm_omni_s_bits() -> None:
    expect_vllm_omnis_bits_in_one_process("encode")


def test_ranks_without_tiles_encode_each_for_itself_as_before() -> None:
    expect_each_rank_to_compute_for_itself("encode")
