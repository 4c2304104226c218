"""What of torch's settings a worker takes over, also where torch's present switch of fp32 precision was used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

import pytest
import torch

from wanshim.core.workers import numerics

CPU = torch.device("cpu")
SWITCHES = {
    "older": lambda: torch.set_float32_matmul_precision("high"),
    "products": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "convolutions": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
}


@pytest.fixture(autouse=True)
def _as_torch_starts() -> Iterator[None]:
    _reset()
    yield
    _reset()


def _reset() -> None:
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("switch", SWITCHES)
def test_worker_computes_with_the_precision_of_its_parent(switch: str) -> None:
    before = numerics.read(CPU)
    SWITCHES[switch]()
    wanted = numerics.read(CPU)
    assert wanted != before
    with numerics.apply(before):
        assert numerics.read(CPU)["matmul precision"] == before["matmul precision"]
    with numerics.apply(wanted):
        assert numerics.read(CPU) == {**wanted, "inference": False}


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor always keeps denormal numbers")
def test_worker_keeps_denormal_numbers_where_its_parent_does() -> None:
    kept = numerics.read(CPU)
    assert kept["denormals"]
    torch.set_flush_denormal(True)
    try:
        assert not numerics.read(CPU)["denormals"]
        with numerics.apply(kept):
            assert numerics.read(CPU)["denormals"]
    finally:
        torch.set_flush_denormal(False)


def set_of(switch: str, value: object) -> Callable[[], None]:
    """Sets an attribute of torch.backends, by its public name."""
    owner, name = switch.rsplit(".", 1)
    return lambda: setattr(attrgetter(owner)(torch.backends), name, value)


# As a program changes what torch starts with, and how it sees what holds.
CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "denormals": (lambda: torch.set_flush_denormal(True), lambda: float(torch.tensor(1e-40) * 1)),
    "tf32": (set_of("cudnn.allow_tf32", False), lambda: torch.backends.cudnn.allow_tf32),
    "cudnn": (set_of("cudnn.enabled", False), lambda: torch.backends.cudnn.enabled),
    "benchmark": (set_of("cudnn.benchmark", True), lambda: torch.backends.cudnn.benchmark),
    "deterministic cudnn": (set_of("cudnn.deterministic", True), lambda: torch.backends.cudnn.deterministic),
    "flash": (lambda: torch.backends.cuda.enable_flash_sdp(False), torch.backends.cuda.flash_sdp_enabled),
    "efficient": (
        lambda: torch.backends.cuda.enable_mem_efficient_sdp(False), torch.backends.cuda.mem_efficient_sdp_enabled
    ),
    "math": (lambda: torch.backends.cuda.enable_math_sdp(False), torch.backends.cuda.math_sdp_enabled),
    "cudnn attention": (lambda: torch.backends.cuda.enable_cudnn_sdp(False), torch.backends.cuda.cudnn_sdp_enabled),
    "half sums": (
        lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    ),
    "warning": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
    ),
    "bf16": (
        set_of("cuda.matmul.allow_bf16_reduced_precision_reduction", False),
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ),
    "fp16": (
        set_of("cuda.matmul.allow_fp16_reduced_precision_reduction", False),
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    ),
    "mkldnn": (set_of("mkldnn.enabled", False), lambda: torch.backends.mkldnn.enabled),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_each_switch_of_the_parent_s_is_set_in_the_worker_and_set_back(change: str) -> None:
    switch, seen = CHANGES[change]
    before, seen_before = numerics.read(CPU), seen()
    try:
        switch()
        wanted, changed = numerics.read(CPU), seen()
        assert changed != seen_before
        with numerics.apply(before):
            assert seen() == seen_before
        with numerics.apply(wanted):
            assert seen() == changed
    finally:
        with numerics.apply(before):
            assert seen() == seen_before


def test_forward_has_the_parent_s_autocast_and_inference_and_no_gradients() -> None:
    plain = numerics.read(CPU)
    assert plain["autocast"].keys() == {"cpu"}
    assert numerics.read(torch.device("cuda"))["autocast"].keys() == {"cpu", "cuda"}
    with torch.autocast("cpu", dtype=torch.float16), torch.inference_mode():
        within = numerics.read(CPU)
    with numerics.apply(within):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_inference_mode_enabled()
    with numerics.apply(plain):
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
