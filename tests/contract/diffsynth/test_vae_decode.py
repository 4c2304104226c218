"""`diffsynth.vae_decode` on the installed DiffSynth."""

from __future__ import annotations

import torch

from tests.contract.decoding import BOTH, Case, check_removed, check_shared
from tests.contract.diffsynth.decode_subject import SUBJECT
from tests.contract.diffsynth.vae import make_vae
from wanshim.core.decoding import parallelize_decode


def test_decode_shared_by_two_ranks_equals_diffsynth() -> None:
    check_shared(SUBJECT, BOTH)


def test_decode_with_tiles_is_exact_and_of_different_latents_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)])


def test_decode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT)


def test_handle_whose_callback_takes_the_frames_returns_none_in_their_place() -> None:
    vae, seen = make_vae("2.1", torch.float32), []
    latent = torch.randn(2, 16, 2, 5, 7)
    handle = parallelize_decode(vae, on_chunk=lambda frames, start: seen.append(frames.shape[2]))
    assert vae.decode(latent, device="cpu") is None
    assert sum(seen) == 2 * 5
    handle.remove()
    assert vae.decode(latent, device="cpu").shape[2] == 5
    assert not {"decode", "single_decode"} & set(vae.__dict__)
