"""Who came first decodes: with cache-dit's parallel VAE on, ours steps aside and says so."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest
import torch

from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.decoding.tiny import make_latent, make_vae

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("cache_dit") is None, reason="cache-dit 1.5 asks for diffusers 0.36 or later"
    ),
]


def with_cache_dit(vae: Any) -> Any:
    """cache-dit's own call. It asks torch for the accelerator to build its mesh; here that is the CPU."""
    from cache_dit import ParallelismConfig
    from cache_dit.distributed.autoencoders import parallelize_autoencoder

    torch.accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cpu")  # type: ignore[assignment]
    parallelize_autoencoder(vae, ParallelismConfig(ulysses_size=2))
    pixels = 8
    vae.enable_tiling(4 * pixels, 4 * pixels, 3 * pixels, 3 * pixels)
    return vae


def taken_before(rank: int, size: int) -> tuple[str, bool]:
    from wanshim.core.decoding import parallelize_decode
    from wanshim.errors import DecodeInvalid

    vae = with_cache_dit(make_vae("2.1"))
    before = dict(vae.__dict__)
    try:
        parallelize_decode(vae)
    except DecodeInvalid as error:
        return str(error), vae.__dict__.keys() == before.keys()
    return "", False


def test_parallelize_decode_of_a_vae_that_cache_dit_holds_is_refused_by_name() -> None:
    for text, untouched in values(run_ranks(taken_before, 2)):
        assert "cache-dit" in text
        assert untouched


def taken_after(rank: int, size: int) -> tuple[bool, list[str]]:
    from wanshim.core.decoding import parallelize_decode

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wanshim").addHandler(handler)
    vae, latent = make_vae("2.1"), make_latent(3)
    handle = parallelize_decode(vae)
    vae.decode(latent)
    planned = handle.plan
    with_cache_dit(vae)
    theirs = [vae.decode(latent).sample for _ in range(2)]
    handle.remove()
    same = all(torch.equal(sample, vae.decode(latent).sample) for sample in theirs)
    return planned is not None and same and handle.plan is planned, lines


def test_parallelize_decode_leaves_the_decode_to_cache_dit_that_came_later_and_warns_once() -> None:
    for same, lines in values(run_ranks(taken_after, 2)):
        assert same
        assert [line for line in lines if "cache-dit" in line] == [
            "wanshim: parallelize_decode: the decode is left to diffusers: "
            "cache-dit or diffusers' own parallelism holds it"
        ]


def feature_steps_aside(rank: int, size: int) -> tuple[bool, str]:
    import wanshim

    vae, latent = with_cache_dit(make_vae("2.1")), make_latent(3)
    theirs = vae.decode(latent).sample
    wanshim.activate("diffusers.vae_decode", strict=True)
    with_feature = vae.decode(latent).sample
    notes = "; ".join(wanshim.report().row("diffusers.vae_decode").notes)
    wanshim.deactivate()
    return torch.equal(theirs, with_feature), notes


def test_feature_on_a_vae_that_cache_dit_holds_is_left_alone_and_reported() -> None:
    for same, notes in values(run_ranks(feature_steps_aside, 2)):
        assert same
        assert "left to the framework: cache-dit" in notes
