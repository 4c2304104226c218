"""`vllm_omni.vae_decode` on vLLM-Omni's own distributed VAEs, 0.18 and later."""

from __future__ import annotations

import os
from functools import update_wrapper
from itertools import product
from typing import Any

import pytest
import torch

from tests.contract.vllm_omni.untiled import (
    expect_each_rank_to_compute_for_itself,
    expect_vllm_omnis_bits_in_one_process,
)
from tests.contract.vllm_omni.vae import make_distributed
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.decoding.tiny import CHANNELS, QWEN_IMAGE, make_latent, tiny, vae_config
from tests.kit.pytest_tests import verdict_here
from wanshim.core.decoding import parallelize_decode
from wanshim.patching.verdict import Verdict

FEATURE = "vllm_omni.vae_decode"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(verdict_here(FEATURE) is not Verdict.PATCH, reason="this release has no distributed Wan VAE"),
]


def decode_native_and_exact(rank: int, size: int) -> list[tuple[str, str, float, int, str, str]]:
    import wanshim

    told = []
    for layout, mode, fast in product(("2.1", "2.2", QWEN_IMAGE), ("auto", "temporal", "spatial"), (False, True)):
        vae, latent = make_distributed(layout, size), make_latent(3)
        assert latent.shape[1] == CHANNELS
        vae.use_tiling = False
        reference = vae.decode(latent).sample
        vae.use_tiling = True
        os.environ.update(WANSHIM_VAE_MODE=mode, WANSHIM_VAE_FAST=str(int(fast)))
        wanshim.activate(f"none,{FEATURE}", strict=True)
        out = vae.decode(latent).sample
        row = wanshim.report().row(FEATURE)
        wanshim.deactivate()
        difference = (out - reference).abs().max().item() if out.numel() else 0.0
        state = str(getattr(row.state, "value", row.state))
        told.append((layout, f"{mode}{' fast' * fast}", difference, out.numel(), state, "; ".join(row.notes)))
    return told


def test_tiled_decode_is_exact_where_the_executor_gives_frames_and_empty_elsewhere() -> None:
    for rank, told in enumerate(values(run_ranks(decode_native_and_exact, 2, seconds=500))):
        assert len(told) == 18
        for layout, mode, difference, count, state, notes in told:
            case = (layout, mode, notes)
            assert state == "exercised", case
            assert ("temporal " if "temporal" in mode else "spatial ") in notes, case
            assert (count > 0) == (rank == 0 or layout == QWEN_IMAGE), case
            assert difference == 0 if mode == "temporal" else difference <= 1e-5, case


def wrapped(forward: Any) -> Any:
    """As accelerate's hooks and many profilers put one around it: it has the name and the module of what is inside."""
    return update_wrapper(lambda *args, **kwargs: forward(*args, **kwargs), forward)


def decode_by_fast_path(rank: int, size: int) -> list[tuple[str, bool, str, str]]:
    from vllm_omni.diffusion.distributed.autoencoders.wan_vae_fastpath import install_wan_vae_fastpath

    import wanshim

    told = []
    for layout, level in product(("2.1", "2.2"), ("lossless", "channels_last", "wrapped")):
        vae, latent = make_distributed(layout, size), make_latent(3)
        assert install_wan_vae_fastpath(
            vae, level="channels_last" if level == "channels_last" else "lossless"
        ).installed
        if level == "wrapped":
            vae.decoder.forward = wrapped(vae.decoder.forward)
        vae.use_tiling = False
        reference = vae.decode(latent).sample
        vae.use_tiling = True
        os.environ["WANSHIM_VAE_MODE"] = "temporal"
        wanshim.activate(f"none,{FEATURE}", strict=True)
        out = vae.decode(latent).sample
        row = wanshim.report(strict=False).row(FEATURE)
        wanshim.deactivate()
        said = "; ".join((*row.notes, *row.fallbacks))
        told.append((level, torch.equal(out, reference) or rank > 0, row.state, said))
    return told


def test_decode_has_the_bits_of_the_lossless_fast_path_and_leaves_other_forwards_to_vllm_omni() -> None:
    """`vae_fast_path`: `initialize_model` of 0.30 and later installs it on CUDA, `lossless` where nothing is asked."""
    pytest.importorskip("vllm_omni.diffusion.distributed.autoencoders.wan_vae_fastpath")
    for told in values(run_ranks(decode_by_fast_path, 2, seconds=300)):
        assert len(told) == 6
        for level, equal, state, said in told:
            if level == "lossless":
                assert (equal, state) == (True, "exercised"), said
                assert "temporal on 2 ranks, strict, compared" in said
            else:
                assert state == "ineffective", (level, said)
                assert "left to the framework: " in said


def decode_in_one_process(rank: int, size: int) -> list[tuple[bool, bool, str, str]]:
    from unittest import mock

    import wanshim
    from wanshim.core.decoding import vae_cache

    told = []
    for on_gpu, layout in product((False, True), ("2.1", "2.2", QWEN_IMAGE)):
        vae, latent = make_distributed(layout, size), make_latent(3)
        tiled = vae.decode(latent).sample
        vae.use_tiling = False
        untiled = vae.decode(latent).sample
        vae.use_tiling = True
        assert not torch.equal(tiled, untiled)
        wanshim.activate(f"none,{FEATURE}", strict=False)
        with mock.patch.object(vae_cache, "gains_alone", return_value=on_gpu):
            out = vae.decode(latent).sample
        row = wanshim.report(strict=False).row(FEATURE)
        wanshim.deactivate()
        told.append((on_gpu, torch.equal(out, untiled if on_gpu else tiled), row.state, "; ".join(row.notes)))
    return told


def test_one_gpu_that_was_asked_for_tiles_decodes_the_whole_picture() -> None:
    """A double says that the operators gain there, for there is no GPU here."""
    (told,) = values(run_ranks(decode_in_one_process, 1, seconds=300))
    assert len(told) == 6
    for on_gpu, equal, state, notes in told:
        assert equal, notes
        assert state == ("exercised" if on_gpu else "ineffective"), notes
        assert ("on 1 rank, strict, compared" if on_gpu else "one process: there is nobody to share with") in notes


def test_handle_on_the_layered_qwen_image_vae_decodes_the_same() -> None:
    """A class of vLLM-Omni's own that no executor decodes."""
    module = pytest.importorskip("vllm_omni.diffusion.models.qwen_image.autoencoder_kl_qwenimage")
    vae = tiny(module.AutoencoderKLQwenImage, {**vae_config(QWEN_IMAGE), "input_channels": 4})
    latent = make_latent(1)
    reference = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    assert torch.equal(vae.decode(latent).sample, reference)
    assert handle.plan is not None
    assert reference.shape[1] == 4


def test_one_gpu_without_tiles_decodes_with_vllm_omni_s_bits() -> None:
    expect_vllm_omnis_bits_in_one_process("decode")


def test_ranks_without_tiles_decode_each_for_itself_as_before() -> None:
    expect_each_rank_to_compute_for_itself("decode")
