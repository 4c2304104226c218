"""`fastvideo.vae_encode` on the installed FastVideo."""

from __future__ import annotations

import pytest
import torch

from tests.contract.decoding import (
    BOTH,
    Case,
    Subject,
    check_handle,
    check_removed,
    check_shared,
    images_and_videos,
    on_several_ranks,
    sweep,
)
from tests.contract.fastvideo.vae import COSMOS, FORKS, encode, expect_fork, make_vae
from tests.distributed.decoding.ranks import run_ranks, values
from wanshim.core.decoding import parallelize_encode
from wanshim.errors import ModelInvalid

SUBJECT = Subject(
    feature="fastvideo.vae_encode", target="fastvideo.models.vaes.wanvae:AutoencoderKLWan.encode", tiles=False
)


def test_encode_shared_by_two_ranks_equals_fastvideo() -> None:
    check_shared(SUBJECT, BOTH)


@pytest.mark.parametrize("layout", FORKS)
@pytest.mark.parametrize("size", [2, 3])
def test_encode_of_a_fork_of_the_wan_vae_shared_by_ranks_equals_fastvideo(layout: str, size: int) -> None:
    expect_fork(layout)
    check_shared(SUBJECT, [case for case in images_and_videos(layout) if not case.tiled], size)


@pytest.mark.parametrize("layout", FORKS)
def test_handle_on_a_fork_of_the_wan_vae_encodes_the_same_and_is_removed_without_trace(layout: str) -> None:
    expect_fork(layout)
    check_handle(SUBJECT, layout, torch.rand(2, 3, 9, 40, 56))


def encode_in_another_window(rank: int, size: int) -> tuple[bool, str]:
    import wanshim

    vae, video = make_vae(COSMOS, torch.float32), torch.zeros(1, 3, 9, 40, 56)
    vae.temporal_window = 8
    expected = encode(vae, video, False)
    wanshim.activate("none,fastvideo.vae_encode", strict=True)
    same = torch.equal(encode(vae, video, False), expected)
    return same, "; ".join(wanshim.report().row("fastvideo.vae_encode").notes)


def test_encode_in_another_window_of_cosmos_is_left_to_fastvideo_and_reported() -> None:
    expect_fork(COSMOS)
    for same, notes in values(run_ranks(encode_in_another_window, 2)):
        assert same
        assert "left to the framework: its temporal_window is 8" in notes


def test_encode_of_a_tiling_vae_is_exact_and_of_different_videos_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)])


def test_encode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT)


def test_handle_encodes_the_same_latents_and_a_vae_without_its_encoder_is_refused() -> None:
    check_handle(SUBJECT, "2.2", torch.rand(1, 3, 5, 32, 48))
    vae = make_vae("2.2", torch.float32)
    del vae.encoder
    with pytest.raises(ModelInvalid, match="loaded without its encoder"):
        parallelize_encode(vae)


@on_several_ranks
def test_encode_in_every_mode_on_several_ranks_holds_its_promise(size: int) -> None:
    check_shared(SUBJECT, sweep(size), size, seconds=880)
