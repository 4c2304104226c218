"""Who came first decodes: with cache-dit's or xDiT's parallel VAE on, ours steps aside and says so.

xDiT's parallel VAE is DistVAE: the `VAEManager` of xfuser 0.7.0 makes the calls that are made here, for rows and, where
tiling is on, for whole tiles. xfuser itself is not installed: its wheel brings packages named `tests` and `benchmarks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.decoding.tiny import make_latent, make_vae

PIXELS = 8  # a latent value's
NEEDS_DIFFUSERS_0_36 = pytest.mark.skipif(
    Version(version("diffusers")) < Version("0.36"), reason="cache-dit 1.5 asks for diffusers 0.36 or later"
)
Holder = Callable[[Any], Any]


def with_cache_dit(vae: Any) -> Any:
    """cache-dit's own call. It asks torch for the accelerator to build its mesh; here that is the CPU."""
    from cache_dit import ParallelismConfig
    from cache_dit.distributed.autoencoders import parallelize_autoencoder

    torch.accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cpu")  # type: ignore[assignment]
    parallelize_autoencoder(vae, ParallelismConfig(ulysses_size=2))
    return with_tiling(vae)


def with_distvae_rows(vae: Any) -> Any:
    """`--use_parallel_vae` of xDiT: a decoder of DistVAE's layers, each rank with some rows."""
    from distvae.vae import parallelize_decoder

    assert parallelize_decoder(vae, dist.group.WORLD) == "WanDecoderAdapter"
    return vae


def with_distvae_tiles(vae: Any) -> Any:
    """`--use_parallel_vae --enable_tiling` of xDiT: the decoder as it was, a `tiled_decode` that shares tiles."""
    from distvae.utils import parallel_context
    from distvae.vae import mark, sharing, tiled_decode_for

    context = parallel_context(dist.group.WORLD, -2, ndim=5)
    mark(vae, context)
    vae.tiled_decode = tiled_decode_for(with_tiling(vae), *sharing(context))
    return vae


def with_tiling(vae: Any) -> Any:
    vae.enable_tiling(4 * PIXELS, 4 * PIXELS, 3 * PIXELS, 3 * PIXELS)
    return vae


def _holder(hold: Holder, says: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(hold, says, id=hold.__name__.removeprefix("with_"), marks=marks)


pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize(
        ("hold", "says"),
        [
            _holder(with_cache_dit, "cache-dit or diffusers' own parallelism holds it", NEEDS_DIFFUSERS_0_36),
            _holder(with_distvae_rows, "distvae has rebuilt the decoder"),
            _holder(with_distvae_tiles, "distvae.vae.tiling brings its own tiled_decode"),
        ],
    ),
]


def taken_before(rank: int, size: int, hold: Holder) -> tuple[str, bool]:
    from wanshim.core.decoding import parallelize_decode
    from wanshim.errors import ModelInvalid

    vae = hold(make_vae("2.1"))
    before = dict(vae.__dict__)
    try:
        parallelize_decode(vae)
    except ModelInvalid as error:
        return str(error), vae.__dict__ == before
    return "", False


def test_parallelize_decode_of_a_vae_that_another_holds_is_refused_by_name(hold: Holder, says: str) -> None:
    for text, untouched in values(run_ranks(taken_before, 2, hold)):
        assert f"AutoencoderKLWan: {says}. Expected a VAE that nobody else decodes in parallel" in text
        assert untouched


def taken_after(rank: int, size: int, hold: Holder) -> tuple[bool, list[str]]:
    from wanshim.core.decoding import parallelize_decode

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wanshim").addHandler(handler)
    vae, latent = make_vae("2.1"), make_latent(3)
    handle = parallelize_decode(vae)
    vae.decode(latent)
    planned = handle.plan
    hold(vae)
    theirs = [_decode(vae, latent) for _ in range(2)]
    handle.remove()
    same = all(torch.equal(sample, _decode(vae, latent)) for sample in theirs)
    return planned is not None and same and handle.plan is planned, lines


def test_parallelize_decode_leaves_the_decode_to_another_that_came_later_and_warns_once(
    hold: Holder, says: str
) -> None:
    for same, lines in values(run_ranks(taken_after, 2, hold)):
        assert same
        left = [line for line in lines if "is left to the framework" in line]
        assert left == [f"parallelize_decode: the decode is left to the framework: {says}"]


def feature_steps_aside(rank: int, size: int, hold: Holder) -> tuple[bool, str]:
    import wanshim

    vae, latent = hold(make_vae("2.1")), make_latent(3)
    theirs = _decode(vae, latent)
    wanshim.activate("none,diffusers.vae_decode", strict=True)
    with_feature = _decode(vae, latent)
    notes = "; ".join(wanshim.report().row("diffusers.vae_decode").notes)
    wanshim.deactivate()
    return torch.equal(theirs, with_feature), notes


def test_feature_on_a_vae_that_another_holds_is_left_alone_and_reported(hold: Holder, says: str) -> None:
    for same, notes in values(run_ranks(feature_steps_aside, 2, hold)):
        assert same
        assert f"left to the framework: {says}" in notes


def _decode(vae: Any, latent: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        frames: torch.Tensor = vae.decode(latent).sample
    return frames
