"""`diffusers.vae_decode` on the installed diffusers."""

from __future__ import annotations

import pytest

from tests.contract.decoding import (
    BOTH,
    Case,
    Subject,
    check_removed,
    check_shared,
    images_and_videos,
    on_several_ranks,
    sweep,
)
from tests.distributed.decoding.tiny import QWEN_IMAGE

pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_wan", reason="this row has no Wan VAE of diffusers")
SUBJECT = Subject(
    feature="diffusers.vae_decode", target="diffusers.models.autoencoders.autoencoder_kl_wan:AutoencoderKLWan._decode"
)


def test_decode_shared_by_two_ranks_equals_diffusers() -> None:
    check_shared(SUBJECT, BOTH)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_decode_of_the_qwen_image_vae_shared_by_ranks_equals_diffusers(size: int) -> None:
    pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_qwenimage", reason="diffusers 0.35 brings it")
    check_shared(SUBJECT, images_and_videos(QWEN_IMAGE), size)


def test_decode_of_a_tiling_vae_is_exact_and_of_different_latents_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)])


def test_decode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT)


@on_several_ranks
def test_decode_in_every_mode_on_several_ranks_holds_its_promise(size: int) -> None:
    check_shared(SUBJECT, sweep(size), size, seconds=880)
