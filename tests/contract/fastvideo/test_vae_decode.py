"""`fastvideo.vae_decode` on the installed FastVideo."""

from __future__ import annotations

import pytest
import torch

from tests.contract.decoding import BOTH, Case, check_handle, check_removed, check_shared, images_and_videos
from tests.contract.fastvideo.decode_subject import SUBJECT
from tests.contract.fastvideo.vae import FORKS, expect_fork


def test_decode_shared_by_two_ranks_equals_fastvideo() -> None:
    check_shared(SUBJECT, BOTH)


@pytest.mark.parametrize("layout", FORKS)
@pytest.mark.parametrize("size", [2, 3])
def test_decode_of_a_fork_of_the_wan_vae_shared_by_ranks_equals_fastvideo(layout: str, size: int) -> None:
    expect_fork(layout)
    check_shared(SUBJECT, [case for case in images_and_videos(layout) if not case.tiled], size)


@pytest.mark.parametrize("layout", FORKS)
def test_handle_on_a_fork_of_the_wan_vae_decodes_the_same_and_is_removed_without_trace(layout: str) -> None:
    expect_fork(layout)
    check_handle(SUBJECT, layout, torch.randn(2, 16, 3, 5, 7))


def test_decode_of_a_tiling_vae_is_exact_and_of_different_latents_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)])


def test_decode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT)
