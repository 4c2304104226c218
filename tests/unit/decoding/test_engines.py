"""The choice of cuDNN's engines, over a double of its frontend (`tests/gpu/decoding/test_engines.py` has that)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.decoding.tiny import make_latent, make_vae
from tests.unit.decoding.engines_double import PADDING, STRIDE, Double, Made, Timed, inputs, key_of
from wanshim.core.decoding import parallelize_decode, run
from wanshim.core.decoding.operators import convolution, winograd
from wanshim.core.decoding.operators import engines as engines_module
from wanshim.core.decoding.operators.base import FastOperators
from wanshim.core.decoding.operators.convolution import Convolution, torch_convolve
from wanshim.core.decoding.operators.cudnn_graph import FrontendMissing
from wanshim.core.decoding.operators.engine_store import EngineStore
from wanshim.core.decoding.operators.engines import Engines, engines_on
from wanshim.core.decoding.operators.window import Pending
from wanshim.core.decoding.operators.winograd import split_weight


def convolve(double: Double, folder: Path, frames: int = 6) -> torch.Tensor:
    x, weight = inputs(frames)
    return Engines(double, EngineStore(folder))(x, weight, STRIDE, PADDING)  # type: ignore[arg-type]


def expected(frames: int = 6) -> torch.Tensor:
    return torch_convolve(*inputs(frames), STRIDE, PADDING)


def test_fastest_engine_computes_and_is_not_searched_for_again(tmp_path: Path) -> None:
    double = Double({1: Made(8.0), 2: Made(5.0), 3: Made(7.0)})
    assert torch.equal(convolve(double, tmp_path), expected())
    used = {number: len(made.lengths) for number, made in double.made.items()}
    assert torch.equal(convolve(double, tmp_path), expected())
    assert double.searches == 1
    assert len(double.made[2].lengths) == used[2] + 2  # compared once in the new process, then used
    assert [len(double.made[n].lengths) for n in (1, 3)] == [used[1], used[3]]


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.float16},
        {"batch": 2},
        {"channels": 16},
        {"rows": 12, "columns": 10},
        {"outputs": 8},
        {"kernel": 1},
        {"stride": (1, 2, 2)},
        {"padding": (0, 0, 0)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_engine_is_searched_for_by_everything_but_the_number_of_frames(changed: dict[str, Any], tmp_path: Path) -> None:
    double = Double({1: Made(2.0)})

    def in_a_new_process(arguments: tuple[Any, ...]) -> int:
        found = Engines(double, EngineStore(tmp_path))(*arguments)  # type: ignore[arg-type]
        assert torch.equal(found, torch_convolve(*arguments))
        return double.searches

    assert in_a_new_process(key_of()) == 1
    assert in_a_new_process(key_of(frames=6)) == 1
    assert in_a_new_process(key_of(**changed)) == 2
    assert in_a_new_process(key_of()) == 2


def test_first_search_of_a_process_warns_once_with_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "wanshim.decoding"):
        for _ in ("decoder", "encoder"):  # each has engines of its own
            found = Engines(Double({1: Made(2.0)}), EngineStore(tmp_path))  # type: ignore[arg-type]
            for x, weight in (inputs(), (inputs()[0][:, :, :, :8], inputs()[1]), (inputs()[0][..., :9], inputs()[1])):
                found(x, weight, STRIDE, PADDING)
            for kept in tmp_path.iterdir():  # so that the next has to search
                kept.unlink()
    (said,) = caplog.messages
    assert str(tmp_path) in said


def test_sizes_without_an_end_are_not_kept_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "_SIZES", 3)
    monkeypatch.setattr(engines_module, "_RUNS", 3)
    double = Double({1: Made(2.0)})
    found = Engines(double, EngineStore(tmp_path))  # type: ignore[arg-type]
    sizes = [key_of(rows=rows, columns=6) for rows in range(6, 12)]
    for arguments in [*sizes, *sizes]:
        assert torch.equal(found(*arguments), torch_convolve(*arguments))
    assert double.searches == len(sizes)  # what is no longer kept here is read from the folder
    for arguments in sizes:
        assert found.equal(*arguments, same=lambda out: True) is not None
    kept = {name: len(value) for name, value in vars(found).items() if isinstance(value, dict)}
    assert set(kept) >= {"_ranked", "_chosen", "_runs"}
    assert all(size <= 3 for size in kept.values()), kept


def test_engine_with_another_result_is_never_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = Double({1: Made(2.0, lambda y: y * 1.02), 2: Made(5.0)})
    with caplog.at_level(logging.WARNING, "wanshim.decoding"):
        assert torch.equal(convolve(double, tmp_path), expected())
    assert "another result" in caplog.text


@pytest.mark.parametrize("at", [0, -1])
def test_engine_that_errs_in_the_first_or_the_last_frame_is_found(tmp_path: Path, at: int) -> None:
    def err(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        y[:, :, at, -1] = 0
        return y

    double = Double({1: Made(2.0, err)})
    assert torch.equal(convolve(double, tmp_path), expected())


def test_engine_that_rounds_otherwise_is_used(tmp_path: Path) -> None:
    double = Double({1: Made(2.0, lambda y: y * (1 + 2**-8))})
    assert not torch.equal(convolve(double, tmp_path), expected())


def test_kept_engine_is_compared_in_each_process(tmp_path: Path) -> None:
    convolve(Double({1: Made(2.0)}), tmp_path)
    spoiled = Double({1: Made(2.0, torch.zeros_like)})
    assert torch.equal(convolve(spoiled, tmp_path), expected())
    assert spoiled.searches == 0


def test_torch_computes_where_no_engine_is_as_fast(tmp_path: Path) -> None:
    double = Double({1: Made(11.0)})
    assert torch.equal(convolve(double, tmp_path), expected())
    calls = len(double.made[1].lengths)
    assert torch.equal(convolve(double, tmp_path), expected())
    assert (double.searches, len(double.made[1].lengths)) == (1, calls)


def test_kept_engine_that_cannot_be_built_is_searched_for_again_once(tmp_path: Path) -> None:
    convolve(Double({1: Made(2.0)}), tmp_path)
    for searches in (1, 0):
        other = Double({2: Made(3.0)})
        assert torch.equal(convolve(other, tmp_path), expected())
        assert other.searches == searches
        assert other.made[2].lengths


@pytest.mark.parametrize(("frames", "lengths"), [(3, {3}), (4, {4}), (5, {2, 3}), (11, {3, 4})])
def test_long_video_goes_through_the_engine_in_even_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frames: int, lengths: set[int]
) -> None:
    weight = inputs()[1]
    monkeypatch.setattr(convolution, "_PIECE", 4 * 2 * 10 * 12 * weight.numel())
    double = Double({1: Made(2.0)})
    convolve(double, tmp_path, frames)
    double.made[1].lengths.clear()
    assert torch.equal(convolve(double, tmp_path, frames), expected(frames))
    assert set(double.made[1].lengths) == lengths


def test_no_piece_has_more_values_than_an_engine_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        convolution, "_LARGEST", 5 * 10 * 12 * 16
    )  # five frames of the output, so three of the input's five
    double = Double({1: Made(2.0)})
    assert torch.equal(convolve(double, tmp_path), expected())
    assert max(double.made[1].lengths) == 3


def test_memory_that_does_not_suffice_to_compare_leaves_it_to_torch_and_keeps_nothing(tmp_path: Path) -> None:
    def full(y: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    assert torch.equal(convolve(Double({1: Made(2.0, full)}), tmp_path), expected())
    assert list(tmp_path.iterdir()) == []


def is_expected(out: torch.Tensor) -> bool:
    return torch.equal(out, expected())


def test_equal_takes_the_fastest_engine_with_the_same_bits(tmp_path: Path) -> None:
    double = Double({1: Made(2.0, lambda y: y * (1 + 2**-7)), 2: Made(5.0), 3: Made(7.0)})
    x, weight = inputs()
    found = Engines(double, EngineStore(tmp_path))  # type: ignore[arg-type]
    way = found.equal(x, weight, STRIDE, PADDING, is_expected)
    for made in double.made.values():
        made.lengths.clear()
    assert way is not None
    assert torch.equal(way(x, weight, STRIDE, PADDING), expected())
    assert [len(made.lengths) for made in double.made.values()] == [0, 1, 0]


def test_equal_is_compared_whenever_it_is_asked(tmp_path: Path) -> None:
    x, weight = inputs()
    found = Engines(Double({1: Made(2.0)}), EngineStore(tmp_path))  # type: ignore[arg-type]
    assert found.equal(x, weight, STRIDE, PADDING, is_expected) is not None
    assert found.equal(x, weight, STRIDE, PADDING, lambda out: False) is None


def test_host_settles_with_the_peers_before_an_engine_is_compared(tmp_path: Path) -> None:
    double, settled = Double({1: Made(2.0)}), []
    found = Engines(double, EngineStore(tmp_path))  # type: ignore[arg-type]
    found.settle = lambda: settled.append(double.searches)
    x, weight = inputs()
    for _ in range(2):
        found(x, weight, STRIDE, PADDING)
    assert len(settled) > 0
    count = len(settled)
    found(x, weight, STRIDE, PADDING)
    assert (settled[0], len(settled)) == (0, count)


def test_equal_is_none_where_no_engine_has_the_bits(tmp_path: Path) -> None:
    double = Double({1: Made(2.0, lambda y: y * (1 + 2**-7))})
    x, weight = inputs()
    found = Engines(double, EngineStore(tmp_path))  # type: ignore[arg-type]
    assert found.equal(x, weight, STRIDE, PADDING, is_expected) is None


@pytest.mark.parametrize(
    ("shape", "weight", "stride", "padding"),
    [
        ((2, 5, 6, 9, 21), (7, 5, 3, 3, 3), (1, 1, 1), (0, 1, 1)),
        ((1, 5, 6, 20, 22), (7, 5, 3, 4, 4), (1, 2, 2), (0, 1, 1)),
        ((3, 5, 19, 17), (4, 5, 3, 3), (1, 1), (1, 1)),
        ((3, 5, 19, 17), (4, 5, 3, 3), (2, 2), (0, 0)),
        ((1, 5, 9, 8, 8), (4, 5, 3, 1, 1), (2, 1, 1), (0, 0, 0)),
    ],
    ids=["batch of videos", "squares of outputs", "images", "halved images", "every second frame"],
)
def test_samples_of_a_right_result_agree_with_the_matrix_product(
    shape: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    conv = Convolution(torch.randn(weight), stride, padding)
    x = torch.randn(shape)
    out = conv.by_torch(x)
    assert list(out.shape) == conv.output_shape(x)
    for at in (0, out.shape[conv.dim] - 1):
        found, expected = conv.samples(x, out, at)
        assert torch.allclose(found, expected, atol=1e-4)
    parts = [part for _, part in conv.pieces(x, out, conv.length(x))]
    assert torch.equal(torch.cat(parts, conv.dim), out)


@pytest.mark.parametrize(
    ("shape", "weight", "stride", "padding"),
    [
        ((1, 3, 11, 9, 10), (16, 3, 3, 3, 3), (1, 1, 1), (0, 1, 1)),  # the output is the larger one
        ((1, 32, 11, 9, 10), (4, 32, 3, 1, 1), (2, 1, 1), (0, 0, 0)),  # the input
        ((7, 3, 9, 10), (16, 3, 3, 3), (1, 1), (1, 1)),
    ],
    ids=["videos", "every second frame", "images"],
)
def test_torch_too_takes_no_more_values_at_once_than_cudnn_counts(
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last_3d if len(shape) == 5 else torch.channels_last)
    kernel = torch.randn(weight)
    whole = torch_convolve(x, kernel, stride, padding)
    most = max(x.numel(), whole.numel()) // 2
    sizes: list[int] = []
    for name in ("conv2d", "conv3d"):
        function = getattr(torch.nn.functional, name)

        def note(given: torch.Tensor, *args: object, function: Any = function) -> torch.Tensor:
            result = function(given, *args)
            sizes.append(max(given.numel(), result.numel()))
            return result

        monkeypatch.setattr(torch.nn.functional, name, note)
    monkeypatch.setattr(convolution, "_LARGEST", most)
    torch.testing.assert_close(torch_convolve(x, kernel, stride, padding), whole)
    assert len(sizes) > 1
    assert max(sizes) <= most
    sizes.clear()
    monkeypatch.setattr(convolution, "_LARGEST", max(x.numel(), whole.numel()))
    assert torch.equal(torch_convolve(x, kernel, stride, padding), whole)
    assert len(sizes) == 1


def by_winograd(double: Double, folder: Path, frames: int = 8) -> torch.Tensor | None:
    x, weight = inputs(frames)
    engines = Engines(double, EngineStore(folder))  # type: ignore[arg-type]
    deferred = engines.by_winograd(x, weight, lambda: split_weight(weight), PADDING)
    return None if deferred is None else FastOperators(None).resolve(Pending(deferred))  # type: ignore[arg-type]


@pytest.mark.parametrize("frames", [4, 7, 8])
def test_winograd_is_used_where_it_is_faster_and_known_to_be_in_the_next_process(frames: int, tmp_path: Path) -> None:
    double = Timed({1: Made(8.0)}, product=1.3)  # 7.8 ms together
    for searches in (2, 2):  # for the direct convolution and for the products
        out = by_winograd(double, tmp_path, frames)
        assert out is not None
        assert (out - expected(frames)).float().norm() <= 2**-8 * expected(frames).float().norm()
        assert double.searches == searches


def test_direct_convolution_stays_where_it_is_faster(tmp_path: Path) -> None:
    double = Timed({1: Made(8.0)}, product=1.4)
    assert by_winograd(double, tmp_path) is None
    double.product = 0.1  # what was measured once stands
    assert by_winograd(double, tmp_path) is None


def test_winograd_with_another_result_is_never_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double = Timed({1: Made(8.0, lambda out: out * 1.1)}, product=0.1)
    assert by_winograd(double, tmp_path) is None
    assert "gives another result than torch" in caplog.text


def test_two_frames_are_left_to_the_direct_convolution(tmp_path: Path) -> None:
    double = Timed({1: Made(8.0)}, product=0.1)
    assert by_winograd(double, tmp_path, frames=2) is None
    assert not double.searches


def test_pieces_are_whole_groups_but_for_the_last(tmp_path: Path) -> None:
    double = Timed({1: Made(8.0)}, product=0.1)
    assert by_winograd(double, tmp_path, frames=11) is not None  # 3 groups, all at once: they are small
    assert set(double.made[1].lengths[-6:]) == {3}
    _, weight = inputs(11)
    assert Convolution(weight, STRIDE, PADDING).spans(11, 1, unit=4) == [(0, 4), (4, 8), (8, 11)]


def test_products_may_take_longer_than_torch_would_if_the_whole_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double, by_torch = Timed({1: Made(8.0)}, product=1.0), Convolution.by_torch

    def timed(conv: Convolution, x: torch.Tensor) -> torch.Tensor:
        double.took += 0.5 if conv.weight.shape[2] == 1 else 20.0
        return by_torch(conv, x)

    monkeypatch.setattr(Convolution, "by_torch", timed)
    assert by_winograd(double, tmp_path) is not None


def test_engines_are_ranked_by_time_where_torch_fails(tmp_path: Path) -> None:
    class Failing(Double):
        def milliseconds(self, work: Callable[[], object]) -> float:
            if not self.searches:
                raise RuntimeError("cuDNN error")
            return super().milliseconds(work)

    double = Failing({1: Made(9.0), 2: Made(5.0), 3: Made(7.0)})
    convolve(double, tmp_path)
    assert len(double.made[2].lengths) > max(len(double.made[number].lengths) for number in (1, 3))


def verdicts(folder: Path) -> dict[str | int, bool]:
    """For what numbers of outputs Winograd's method is known to be used or not."""
    kept = [json.loads(path.read_text()) for path in folder.iterdir()]
    return {each["facts"]["outputs"]: each["engine"] is not None for each in kept if "outputs" in each["facts"]}


def test_an_incomplete_group_is_judged_only_where_there_is_no_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five outputs take as many products as eight: what is slower for them may be faster for a video."""
    monkeypatch.setattr(winograd, "_SMALL", 0)
    monkeypatch.setattr(winograd, "_VALUES", 1)  # one group at once
    slow, fast = Timed({1: Made(8.0)}, product=1.4), Timed({1: Made(8.0)}, product=1.3)
    assert by_winograd(slow, tmp_path, frames=3) is None
    assert verdicts(tmp_path) == {3: False}
    assert by_winograd(fast, tmp_path, frames=7) is not None
    assert by_winograd(slow, tmp_path, frames=6) is not None
    assert verdicts(tmp_path) == {3: False, "whole groups": True}


def test_direct_engine_is_compared_at_the_lengths_that_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of 2^31 values may be more than an engine takes."""
    monkeypatch.setattr(Convolution, "length", lambda conv, x: 3)
    double = Timed({1: Made(8.0)}, product=0.1)
    assert by_winograd(double, tmp_path, frames=8) is not None
    assert max(double.made[1].lengths) == 3


def test_pieces_of_other_lengths_have_runs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "_SMALL", 0)  # three groups go two at once
    out = by_winograd(Timed({1: Made(8.0)}, product=0.1), tmp_path, frames=11)
    assert out is not None
    assert (out - expected(11)).float().norm() <= 2**-7 * expected(11).float().norm()


def test_memory_that_does_not_suffice_for_winograd_leaves_it_to_the_direct_convolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engines_module, "Buffers", full)
    assert by_winograd(Timed({1: Made(8.0)}, product=0.1), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_memory_that_does_not_suffice_for_the_direct_search_settles_nothing_for_later(tmp_path: Path) -> None:
    """Else Winograd's method would be kept for having been faster than torch alone."""

    def full(out: torch.Tensor) -> torch.Tensor:
        if out.shape[2] > 2:  # frames of the direct convolution; products have two
            raise torch.OutOfMemoryError
        return out

    assert by_winograd(Timed({1: Made(8.0, full)}, product=0.1), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_winograd_that_fails_to_run_is_left_to_the_direct_convolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patched:
        patched.setattr(winograd.Buffers, "multiply", broken)
        assert by_winograd(Timed({1: Made(8.0)}, product=0.1), tmp_path) is None
    assert not verdicts(tmp_path)  # another process tries again
    assert by_winograd(Timed({1: Made(8.0)}, product=0.1), tmp_path) is not None


def test_values_in_fp32_stay_with_torch(tmp_path: Path) -> None:
    double = Double({1: Made(2.0)})
    x, weight = (each.float() for each in inputs())
    out = Engines(double, EngineStore(tmp_path))(x, weight, STRIDE, PADDING)  # type: ignore[arg-type]
    assert torch.equal(out, torch_convolve(x, weight, STRIDE, PADDING))
    assert double.searches == 0


def test_without_a_gpu_there_are_no_engines() -> None:
    assert engines_on(torch.device("cpu"), None, torch.bfloat16) is None


def test_a_missing_frontend_is_said_once_and_where_it_would_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(device: torch.device) -> None:
        raise FrontendMissing("nvidia-cudnn-frontend cannot be imported (none)")

    monkeypatch.setattr(engines_module, "Frontend", missing)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    engines_module._announce_missing.cache_clear()
    with monkeypatch.context() as rocm:  # whose GPUs torch calls cuda, too
        rocm.setattr(torch.version, "hip", "6.4")
        assert engines_on(torch.device("cuda"), None, torch.bfloat16) is None
    assert not caplog.records
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert engines_on(torch.device("cuda"), None, dtype) is None
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.startswith("nvidia-cudnn-frontend cannot be imported (none). Convolutions run by the engine")
    assert "pip install 'wanshim[cudnn]'" in said
    engines_module._announce_missing.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2.1", pytest.param("2.2", marks=pytest.mark.sweep)])
def test_fast_decode_by_winograd_is_as_close_as_without(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae, latent = make_vae(layout, torch.bfloat16), make_latent(3, dtype=torch.bfloat16)
    exact = make_vae(layout, torch.float32).decode(latent.float()).sample
    monkeypatch.setattr(winograd, "_CHANNELS", 8)
    apart = []
    for product in (1.4, 0.1):  # ms: six take longer than the direct convolution, or less
        engines = Engines(Timed({1: Made(8.0)}, product), EngineStore(tmp_path / str(product)))  # type: ignore[arg-type]
        monkeypatch.setattr(run, "engines_on", lambda *args, engines=engines: engines)
        handle = parallelize_decode(vae, strict=False)
        apart.append((vae.decode(latent).sample.float() - exact).norm())
        assert handle.plan is not None
        assert handle.plan.by_winograd
        handle.remove()
        taken = [run for key, run in engines._runs.items() if key[0] == "winograd" and run is not None]
        assert bool(taken) is (product == 0.1)
    assert apart[1] < 1.1 * apart[0]
