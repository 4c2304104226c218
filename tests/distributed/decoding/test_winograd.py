"""Fast decodes by Winograd's method over ranks: last frames are computed and sent first, rows when all are there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.unit.decoding.engines_double import Made, Timed
from wanshim.core.decoding import parallel_vae, parallelize_decode
from wanshim.core.decoding.operators import winograd
from wanshim.core.decoding.operators.engine_store import EngineStore
from wanshim.core.decoding.operators.engines import Engines

from .ranks import run_ranks, values
from .tiny import make_latent, make_vae

NEVER, ALWAYS = 1.4, 0.1  # ms of a product; the direct convolution takes 8


def decode(rank: int, size: int, layout: str, mode: str, times: tuple[float, float]) -> list[tuple[float, bool]]:
    """How far each picture is from diffusers' in fp32, and whether Winograd's method was used: never; by `times`."""
    vae, latent = make_vae(layout, torch.bfloat16), make_latent(7, dtype=torch.bfloat16)
    exact = make_vae(layout, torch.float32).decode(latent.float()).sample
    found = []
    for product in (NEVER, times[rank]):
        with tempfile.TemporaryDirectory() as folder:
            engines = Engines(Timed({1: Made(8.0)}, product), EngineStore(Path(folder)))  # type: ignore[arg-type]
            with (
                mock.patch.object(winograd, "_CHANNELS", 8),
                mock.patch.object(winograd, "_SMALL", 0),
                mock.patch.object(winograd, "_VALUES", 1),  # a piece is one group
                mock.patch.object(parallel_vae.ParallelVae, "_load"),
                mock.patch.object(parallel_vae, "engines_on", return_value=engines),
            ):
                handle = parallelize_decode(vae, mode=mode, strict=False)
                apart = float((vae.decode(latent).sample.float() - exact).norm())
                handle.remove()
        taken = [run for key, run in engines._runs.items() if key[0] == "winograd" and run is not None]
        found.append((apart, bool(taken)))
    return found


@pytest.mark.parametrize("layout", ["2.1", "2.2"])
@pytest.mark.parametrize("mode", ["temporal", "spatial"])
@pytest.mark.parametrize("times", [(ALWAYS, ALWAYS), (ALWAYS, NEVER), (NEVER, ALWAYS)])  # each rank measures its own
def test_picture_by_winograd_is_as_close_on_every_rank(layout: str, mode: str, times: tuple[float, float]) -> None:
    for rank, ((without, never), (found, taken)) in enumerate(values(run_ranks(decode, 2, layout, mode, times))):
        assert taken is (times[rank] == ALWAYS)
        assert not never
        assert found < 1.1 * without
