"""`fastvideo.vae_encode` on the installed FastVideo."""

from __future__ import annotations

import pytest
import torch

from tests.contract.decoding import BOTH, Case, Subject, check_removed, check_shared, sweep
from tests.contract.fastvideo.vae import encode, make_vae
from wanshim.core.decoding import parallelize_encode
from wanshim.errors import VaeInvalid

SUBJECT = Subject(
    feature="fastvideo.vae_encode",
    module="tests.contract.fastvideo.vae",
    target="fastvideo.models.vaes.wanvae:AutoencoderKLWan.encode",
)


def test_encode_shared_by_two_ranks_equals_fastvideo() -> None:
    check_shared(SUBJECT, BOTH)


def test_encode_of_a_tiling_vae_is_exact_and_of_different_videos_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)])


def test_encode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT)


def test_handle_encodes_the_same_latents_and_a_vae_without_its_encoder_is_refused() -> None:
    vae, video = make_vae("2.2", torch.float32), torch.rand(1, 3, 5, 32, 48)
    expected = encode(vae, video, False)
    handle = parallelize_encode(vae)
    assert torch.equal(encode(vae, video, False), expected)
    assert handle.plan is not None
    handle.remove()
    del vae.encoder
    with pytest.raises(VaeInvalid, match="loaded without its encoder"):
        parallelize_encode(vae)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_encode_in_every_mode_on_several_ranks_holds_its_promise(size: int) -> None:
    check_shared(SUBJECT, sweep(size), size, seconds=880)
