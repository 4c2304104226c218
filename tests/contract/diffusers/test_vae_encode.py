"""`diffusers.vae_encode` on the installed diffusers."""

from __future__ import annotations

import pytest
import torch

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
from tests.contract.diffusers.vae import make_vae
from tests.distributed.decoding.tiny import QWEN_IMAGE
from wanshim.patching.vae_method import COMPILED

pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_wan", reason="this row has no Wan VAE of diffusers")
SUBJECT = Subject(
    feature="diffusers.vae_encode", target="diffusers.models.autoencoders.autoencoder_kl_wan:AutoencoderKLWan._encode"
)


def test_encode_shared_by_two_ranks_equals_diffusers() -> None:
    check_shared(SUBJECT, BOTH)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_encode_of_the_qwen_image_vae_shared_by_ranks_equals_diffusers(size: int) -> None:
    pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_qwenimage", reason="diffusers 0.35 brings it")
    check_shared(SUBJECT, images_and_videos(QWEN_IMAGE), size)


def test_encode_of_a_tiling_vae_is_exact_and_of_different_videos_is_left_alone() -> None:
    check_shared(SUBJECT, [Case("2.1", "float32", 3, tiled=True), Case("2.1", "float32", 2, apart=True)])


def test_encode_after_deactivate_is_the_original() -> None:
    check_removed(SUBJECT)


def test_subclass_with_an_encode_of_its_own_is_refused_by_name() -> None:
    from wanshim.core.decoding import parallelize_encode
    from wanshim.errors import ModelInvalid

    vae = make_vae("2.1", torch.float32)
    vae.__class__ = type("Mine", (type(vae),), {"_encode": lambda self, x: x})
    with pytest.raises(ModelInvalid, match=r"Mine brings its own _encode"):
        parallelize_encode(vae)


def test_encode_that_is_compiled_on_the_vae_is_the_frameworks_and_reported_so() -> None:
    """As vLLM-Omni's DreamZero has it, in one graph."""
    import wanshim

    vae, video = make_vae("2.1", torch.float32), torch.ones(1, 3, 1, 16, 16)
    wanshim.activate("none,diffusers.vae_encode")
    vae._encode = torch.compile(vae._encode, backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            vae.encode(video)
    row = wanshim.report().row("diffusers.vae_encode")
    assert (row.state, row.fallbacks) == ("ineffective", {COMPILED: 1})


@on_several_ranks
def test_encode_in_every_mode_on_several_ranks_holds_its_promise(size: int) -> None:
    check_shared(SUBJECT, sweep(size), size, seconds=880)
