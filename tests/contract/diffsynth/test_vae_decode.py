"""`diffsynth.vae_decode` on the installed DiffSynth."""

from __future__ import annotations

import pytest
import torch

from tests.contract.decoding import BOTH, Case, check_handle, check_removed, check_shared
from tests.contract.diffsynth.decode_subject import SUBJECT
from tests.contract.diffsynth.prepared import Fork
from tests.contract.diffsynth.vae import QWEN_IMAGE, make_qwen_image_2_1, make_vae, qwen_image_cases
from wanshim.core.decoding import find_binding, parallelize_decode
from wanshim.core.decoding.operators.strict_checks import Sizes, sizes_of
from wanshim.errors import VaeInvalid


def test_decode_shared_by_two_ranks_equals_diffsynth() -> None:
    check_shared(SUBJECT, BOTH, start=Fork)


@pytest.mark.parametrize("size", [2, 3])
def test_decode_of_the_qwen_image_vae_shared_by_ranks_equals_diffsynth(size: int) -> None:
    check_shared(SUBJECT, qwen_image_cases(SUBJECT.verb), size, start=Fork)


def test_decode_with_tiles_is_exact_and_of_different_latents_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)], start=Fork)


def test_decode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT, start=Fork)


def test_handle_on_the_qwen_image_vae_decodes_the_same_and_is_removed_without_trace() -> None:
    for frames in {case.frames for case in qwen_image_cases(SUBJECT.verb)}:
        check_handle(SUBJECT, QWEN_IMAGE, torch.randn(2, 16, frames, 5, 7).bfloat16())


def test_lengths_of_norms_are_computed_in_the_dtype_of_the_values() -> None:
    """The kernels for others are not compiled ahead."""
    for layout in ("2.1", "2.2"):
        vae = make_vae(layout, torch.bfloat16)
        assert sizes_of(find_binding(vae).graph, torch.bfloat16) == {Sizes.NARROW}


def test_vae_of_qwen_image_2_1_is_refused_by_name() -> None:
    vae = make_qwen_image_2_1()
    with pytest.raises(VaeInvalid, match=r"no decoder graph for diffsynth\.models\.qwen_image_21_vae\.QwenImage21VAE"):
        parallelize_decode(vae)


def test_handle_whose_callback_takes_the_frames_returns_none_in_their_place() -> None:
    vae, seen = make_vae("2.1", torch.float32), []
    latent = torch.randn(2, 16, 2, 5, 7)
    handle = parallelize_decode(vae, on_chunk=lambda frames, start: seen.append(frames.shape[2]))
    assert vae.decode(latent, device="cpu") is None
    assert sum(seen) == 2 * 5
    handle.remove()
    assert vae.decode(latent, device="cpu").shape[2] == 5
    assert not {"decode", "single_decode"} & set(vae.__dict__)
