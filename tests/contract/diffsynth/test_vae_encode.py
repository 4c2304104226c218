"""`diffsynth.vae_encode` on the installed DiffSynth."""

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
    on_several_ranks,
    sweep,
)
from tests.contract.diffsynth.prepared import Fork
from tests.contract.diffsynth.vae import QWEN_IMAGE, encode, make_qwen_image_2_1, make_vae, qwen_image_cases
from tests.distributed.decoding.ranks import run_ranks, values
from wanshim.core.decoding import parallelize_encode
from wanshim.errors import ModelInvalid

SUBJECT = Subject(feature="diffsynth.vae_encode", target="diffsynth.models.wan_video_vae:WanVideoVAE.encode")


@pytest.mark.slow
def test_encode_shared_by_two_ranks_equals_diffsynth() -> None:
    check_shared(SUBJECT, BOTH, start=Fork)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_encode_of_the_qwen_image_vae_shared_by_ranks_equals_diffsynth(size: int) -> None:
    check_shared(SUBJECT, qwen_image_cases(SUBJECT.verb), size, start=Fork)


@pytest.mark.slow
def test_encode_with_tiles_is_exact_and_of_different_videos_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)], start=Fork)


def test_encode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT, start=Fork)


def encode_own_videos(rank: int, size: int) -> tuple[bool, list[str]]:
    """Videos of different sizes, and one more on rank 0: what data-parallel ranks do."""
    import wanshim

    vae = make_vae("2.1", torch.float32)
    videos = [torch.rand(1, 3, 5, 32, 32 + 16 * rank) for _ in range(3 - rank)]
    expected = [encode(vae, video, False) for video in videos]
    wanshim.activate("none,diffsynth.vae_encode", strict=True)
    same = all(torch.equal(encode(vae, video, False), latent) for video, latent in zip(videos, expected))
    row = wanshim.report().row("diffsynth.vae_encode")
    return same, list(row.notes)


def test_ranks_with_videos_of_their_own_encode_them_alone_and_wait_for_nobody_after_the_first() -> None:
    for same, notes in values(run_ranks(encode_own_videos, 2, start=Fork)):
        assert same
        assert any("left to the framework: the ranks encode different videos" in note for note in notes), notes


def test_handle_encodes_the_same_latents_and_is_removed_without_trace() -> None:
    check_handle(SUBJECT, "2.2", torch.rand(2, 3, 5, 32, 48))


def test_handle_on_the_qwen_image_vae_encodes_the_same_and_is_removed_without_trace() -> None:
    for frames in {case.frames for case in qwen_image_cases(SUBJECT.verb)}:
        check_handle(SUBJECT, QWEN_IMAGE, torch.rand(2, 3, frames, 40, 56).bfloat16())


def test_vae_of_qwen_image_2_1_is_refused_by_name() -> None:
    vae = make_qwen_image_2_1()
    with pytest.raises(
        ModelInvalid, match=r"no encoder graph for diffsynth\.models\.qwen_image_21_vae\.QwenImage21VAE"
    ):
        parallelize_encode(vae)


@on_several_ranks
def test_encode_in_every_mode_on_several_ranks_holds_its_promise(size: int) -> None:
    check_shared(SUBJECT, sweep(size), size, seconds=880, start=Fork)
