"""`vllm_omni.vae_decode` on vLLM-Omni's own distributed VAEs, 0.18 and later."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from tests.contract.vllm_omni.vae import make_distributed
from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.decoding.tiny import CHANNELS, QWEN_IMAGE, make_latent, tiny, vae_config
from wanshim.core.decoding import parallelize_decode
from wanshim.patching.verdict import Verdict
from wanshim.testing.pytest_tests import verdict_here

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


def decode_by_fast_path(rank: int, size: int) -> list[tuple[str, bool, str, str]]:
    from vllm_omni.diffusion.distributed.autoencoders.wan_vae_fastpath import install_wan_vae_fastpath

    import wanshim

    told = []
    for layout, level in product(("2.1", "2.2"), ("lossless", "channels_last")):
        vae, latent = make_distributed(layout, size), make_latent(3)
        assert install_wan_vae_fastpath(vae, level=level).installed
        vae.use_tiling = False
        reference = vae.decode(latent).sample
        vae.use_tiling = True
        os.environ["WANSHIM_VAE_MODE"] = "temporal"
        wanshim.activate(f"none,{FEATURE}", strict=True)
        out = vae.decode(latent).sample
        row = wanshim.report().row(FEATURE)
        wanshim.deactivate()
        told.append((f"{layout} {level}", torch.equal(out, reference) or rank > 0, row.state, "; ".join(row.notes)))
    return told


def test_decode_has_the_bits_of_the_fast_path_that_vllm_omni_installs_itself() -> None:
    """`vae_fast_path`: `initialize_model` of 0.30 and later installs it on CUDA, `lossless` where nothing is asked."""
    pytest.importorskip("vllm_omni.diffusion.distributed.autoencoders.wan_vae_fastpath")
    for told in values(run_ranks(decode_by_fast_path, 2, seconds=300)):
        assert len(told) == 4
        for case, equal, state, notes in told:
            assert equal, (case, notes)
            assert state == "exercised", (case, notes)
            assert "temporal on 2 ranks, strict, compared" in notes, (case, notes)


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
