"""`fastvideo.vae_decode` on the installed FastVideo."""

from __future__ import annotations

from tests.contract.decoding import BOTH, Case, check_removed, check_shared
from tests.contract.fastvideo.decode_subject import SUBJECT


def test_decode_shared_by_two_ranks_equals_fastvideo() -> None:
    check_shared(SUBJECT, BOTH)


def test_decode_of_a_tiling_vae_is_exact_and_of_different_latents_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)])


def test_decode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT)
