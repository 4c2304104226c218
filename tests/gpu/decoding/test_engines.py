"""cuDNN's engines on one GPU: the fast decode by those that were searched for, and strict ones with equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wanshim.core.decoding import parallelize_decode, run
from wanshim.core.decoding.operators import engines
from wanshim.core.decoding.operators.attention_kernel import attend, attend_in_parts
from wanshim.core.decoding.operators.base import FastOperators
from wanshim.core.decoding.operators.convolution import torch_convolve
from wanshim.core.decoding.operators.cudnn_graph import Frontend
from wanshim.core.decoding.operators.engine_store import EngineStore
from wanshim.core.decoding.operators.engines import Engines
from wanshim.core.decoding.operators.window import Pending
from wanshim.core.decoding.operators.winograd import split_weight

from .everything import on_gpu

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend, the extra `cudnn`, is not installed")
CONVOLUTIONS = [  # input, weight, stride, padding
    ((1, 96, 6, 176, 320), (96, 96, 3, 3, 3), (1, 1, 1), (0, 1, 1)),
    ((1, 96, 6, 177, 321), (192, 96, 3, 3, 3), (1, 1, 1), (0, 0, 0)),
    ((1, 96, 6, 176, 320), (16, 96, 3, 4, 4), (1, 2, 2), (0, 1, 1)),
    ((5, 192, 88, 160), (96, 192, 3, 3), (1, 1), (1, 1)),
    ((5, 96, 89, 161), (96, 96, 3, 3), (2, 2), (0, 0)),
    ((1, 384, 7, 22, 40), (384, 384, 3, 1, 1), (2, 1, 1), (0, 0, 0)),
]


def last(*shape: int) -> torch.Tensor:
    layout = torch.channels_last_3d if len(shape) == 5 else torch.channels_last
    return torch.randn(shape, device="cuda").bfloat16().to(memory_format=layout)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("shape", "weight", "stride", "padding"), CONVOLUTIONS)
def test_engine_computes_what_torch_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> None:
    monkeypatch.setattr(engines, "_LIMIT", 10.0)  # an engine, whether it is faster than torch or not
    torch.manual_seed(0)
    x, kernel = last(*shape), last(*weight)
    found = Engines(Frontend(x.device), EngineStore(tmp_path))
    out, expected = found(x, kernel, stride, padding), torch_convolve(x, kernel, stride, padding)
    assert any(run is not None for run in found._runs.values())
    assert (out - expected).float().norm() <= 2**-8 * expected.float().norm()
    assert out.stride() == expected.stride()
    equal = found.equal(x, kernel, stride, padding, lambda out: torch.equal(out, expected))
    assert torch.equal(equal(x, kernel, stride, padding), expected)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("frames", [4, 7, 16])
@pytest.mark.parametrize("batch", [1, 2])
def test_winograd_gives_what_torch_gives_and_is_as_close(
    frames: int, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engines, "_time_often", lambda self, work: (work(), next(times))[1])
    monkeypatch.setattr(engines, "_LIMIT", 10.0)
    times = iter((1.0, 2.0))  # of the products, of the direct convolution: searched for once
    torch.manual_seed(0)
    x, weight = last(batch, 192, frames + 4, 66, 70)[:, :, 1:-1], last(256, 192, 3, 3, 3)
    found = Engines(Frontend(x.device), EngineStore(tmp_path))
    deferred = found.by_winograd(x, weight, lambda: split_weight(weight), (0, 1, 1))
    assert deferred is not None
    out = FastOperators(None).resolve(Pending(deferred))  # type: ignore[arg-type]
    direct = torch_convolve(x, weight, (1, 1, 1), (0, 1, 1))
    exact = torch_convolve(x.double(), weight.double(), (1, 1, 1), (0, 1, 1))
    assert out.stride() == direct.stride()
    assert (out - exact).norm() <= 1.2 * (direct - exact).norm()


@pytest.mark.gpu(1)
def test_engine_is_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernel = last(1, 96, 6, 176, 320), last(96, 96, 3, 3, 3)
    store = EngineStore(tmp_path)
    out = Engines(Frontend(x.device), store)(x, kernel, (1, 1, 1), (0, 1, 1))
    monkeypatch.setattr(Engines, "_fastest", lambda *args: pytest.fail("searched again"))
    assert torch.equal(Engines(Frontend(x.device), store)(x, kernel, (1, 1, 1), (0, 1, 1)), out)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
def test_strict_decode_through_engines_has_the_bits_of_diffusers(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "engine_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(engines, "_LIMIT", 10.0)  # for so small a picture torch's own engine is the faster one
    monkeypatch.setattr(run, "engines_on", lambda device, share, dtype: engines.engines_on(device, None, dtype))
    vae, latent = on_gpu(layout, torch.bfloat16, 5)
    reference = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    handle.wait_for_kernels(latent.shape)
    for _ in range(2):
        assert torch.equal(vae.decode(latent).sample, reference)
    ways = handle.parallel.operators.checks.ways._found.values()
    handle.remove()
    assert any(way.relaid not in (None, torch_convolve) for way in ways)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("counts", [(70, 133), (128, 32), (1, 1)])
def test_attention_with_384_channels_is_that_of_fp32(counts: tuple[int, int]) -> None:
    torch.manual_seed(0)
    queries = torch.randn(3, 1, counts[0], 384, device="cuda").bfloat16()
    keys, values = torch.randn(3, 1, counts[1], 768, device="cuda").bfloat16().chunk(2, dim=-1)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in (queries, keys, values)))
    assert (attend(queries, keys, values) - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.gpu(1)
def test_attention_in_parts_has_the_bits_of_one_call_and_stores_two_gib_of_scores() -> None:
    """A picture of 1536x1536 has 36,864 tokens; one call stores 5.1 GiB."""
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 1, 1, 36_864, 384, device="cuda").bfloat16().unbind(0)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = attend_in_parts(queries, keys, values)
    assert torch.cuda.max_memory_allocated() - before < 2.5 * 2**30
    assert torch.equal(found, expected)
