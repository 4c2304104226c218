"""Fast decodes by Winograd's method over ranks: last frames are computed and sent first, rows when all are there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.unit.decoding.engines_double import Made, Timed
from wanshim.core.decoding import parallelize_decode, run
from wanshim.core.decoding.operators import winograd
from wanshim.core.decoding.operators.engine_store import EngineStore
from wanshim.core.decoding.operators.engines import Engines

from .ranks import run_ranks, values
from .tiny import make_latent, make_vae

NEVER, ALWAYS = 1.4, 0.1  # ms of a product; the direct convolution takes 8
TIMES = ((NEVER, NEVER), (ALWAYS, ALWAYS), (ALWAYS, NEVER), (NEVER, ALWAYS))  # of each rank, which measures its own


def decode(rank: int, size: int, layout: str, mode: str) -> list[tuple[float, bool]]:
    """For all `TIMES`: how far the picture is from diffusers' in fp32; is Winograd used?"""
    vae, latent = make_vae(layout, torch.bfloat16), make_latent(3, dtype=torch.bfloat16)
    exact = make_vae(layout, torch.float32).decode(latent.float()).sample
    return [_decode(vae, latent, exact, mode, times[rank]) for times in TIMES]


def _decode(vae: Any, latent: torch.Tensor, exact: torch.Tensor, mode: str, product: float) -> tuple[float, bool]:
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(Timed({1: Made(8.0)}, product), EngineStore(Path(folder)))  # type: ignore[arg-type]
        with (
            mock.patch.object(winograd, "_CHANNELS", 8),
            mock.patch.object(winograd, "_SMALL", 0),
            mock.patch.object(winograd, "_VALUES", 1),  # a piece is one group
            mock.patch.object(run, "engines_on", return_value=engines),
        ):
            handle = parallelize_decode(vae, mode=mode, strict=False)
            apart = float((vae.decode(latent).sample.float() - exact).norm())
            handle.remove()
    return apart, any(run for key, run in engines._runs.items() if key[0] == "winograd")


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["temporal", "spatial"])
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
def test_picture_by_winograd_is_as_close_whoever_of_the_ranks_uses_it(layout: str, mode: str) -> None:
    for rank, found in enumerate(values(run_ranks(decode, 2, layout, mode, seconds=280))):
        assert [used for _, used in found] == [times[rank] == ALWAYS for times in TIMES]
        without, *others = (apart for apart, _ in found)
        assert max(others) < 1.1 * without
