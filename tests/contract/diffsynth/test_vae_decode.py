"""`diffsynth.vae_decode` on the installed DiffSynth."""

from __future__ import annotations

from tests.contract.decoding import BOTH, Case, Subject, check_removed, check_shared

SUBJECT = Subject(
    feature="diffsynth.vae_decode",
    module="tests.contract.diffsynth.vae",
    target="diffsynth.models.wan_video_vae:WanVideoVAE.decode",
)


def test_decode_shared_by_two_ranks_equals_diffsynth() -> None:
    check_shared(SUBJECT, BOTH)


def test_decode_with_tiles_is_exact_and_of_different_latents_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)])


def test_decode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT)
