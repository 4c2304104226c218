from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import safetensors.torch
import torch

from wanshim.core.encoding import EncoderPlan, choose_device, peer_gpu_bytes, plan_encoder, read_checkpoint
from wanshim.core.encoding.placement import Checkpoint
from wanshim.core.shared.gpu_memory import give_back
from wanshim.errors import WanshimError

UMT5_XXL = Checkpoint(elements=5_680_910_336, dtype=torch.bfloat16)
GB = 10**9
GPU0, GPU1, GPU2 = (torch.device("cuda", i) for i in range(3))


def plan(free: int = 80 * GB, device: torch.device = GPU0) -> EncoderPlan:
    return plan_encoder(UMT5_XXL, compute_dtype=torch.float32, device=device, why="by test", free_bytes=lambda _: free)


def test_plan_encoder_that_fits_is_whole_on_the_own_device() -> None:
    assert str(plan()) == ("encoder (22.7 GB in float32) on cuda:0, whole: by test; 80.0 GB free")


def test_plan_encoder_that_does_not_fit_goes_layer_by_layer_in_the_checkpoints_dtype() -> None:
    assert str(plan(free=10 * GB)) == (
        "encoder (22.7 GB in float32) on cuda:0, layer by layer from bfloat16 on the host: by test; only 10.0 GB free"
    )


def test_plan_encoder_wider_checkpoint_rests_in_the_configured_precision() -> None:
    found = plan_encoder(
        Checkpoint(UMT5_XXL.elements, torch.float32),
        compute_dtype=torch.bfloat16,
        device=GPU0,
        why="by test",
        free_bytes=lambda device: 5 * GB,
    )
    assert (found.residence, found.resident_dtype, found.weight_bytes) == (
        "layers",
        torch.bfloat16,
        11361820672,
    )


@pytest.mark.parametrize(
    ("beyond", "residence"),
    [(UMT5_XXL.elements * 4, "whole"), (UMT5_XXL.elements * 4 - 1, "layers"), (0, "layers"), (-1, None)],
    ids=["just whole", "just not whole", "just a layer", "not a layer"],
)
def test_plan_encoder_leaves_two_gib_beside_the_weights(beyond: int, residence: str | None) -> None:
    refused = pytest.raises(WanshimError, match="too little for even one layer") if residence is None else nullcontext()
    with refused:
        assert plan(free=2 * 2**30 + beyond).residence == residence


def test_plan_encoder_on_cpu_asks_for_no_gpu_memory() -> None:
    found = plan(free=0, device=torch.device("cpu"))
    assert (found.residence, found.resident_dtype, found.reason) == ("whole", torch.float32, "by test")


def test_plan_encoder_that_is_whole_lies_there_in_the_configured_precision() -> None:
    assert plan().resident_dtype == torch.float32


def test_plan_encoder_of_eight_bit_weights_rests_in_the_configured_precision() -> None:
    """A framework has no name for a module of bytes: it makes values of them when it loads."""
    found = plan_encoder(
        Checkpoint(10**9, torch.uint8),
        compute_dtype=torch.bfloat16,
        device=GPU0,
        why="by test",
        free_bytes=lambda device: 3 * GB,
    )
    assert (found.residence, found.resident_dtype) == ("layers", torch.bfloat16)


def test_plan_encoder_on_a_gpu_whose_memory_is_unknown_is_refused() -> None:
    with pytest.raises(WanshimError, match="too little"):
        plan_encoder(UMT5_XXL, compute_dtype=torch.float32, device=GPU0, why="by test", free_bytes=lambda _: None)


def test_plan_encoder_full_gpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(WanshimError, match=r"1\.0 GB free.*WANSHIM_ENCODE_ON=cpu"):
        plan(free=1 * GB)


def choose(where: str, local: torch.device = GPU0, *free: int) -> torch.device:
    return choose_device(where, local, lambda: dict(zip((GPU0, GPU1, GPU2), free, strict=True)))[0]


@pytest.mark.parametrize(
    ("where", "expected"), [("auto", "cuda:1"), ("local", "cuda:1"), ("cpu", "cpu"), ("cuda:2", "cuda:2")]
)
def test_choose_device_takes_what_is_asked_for(where: str, expected: str) -> None:
    assert choose(where, GPU1) == torch.device(expected)


@pytest.mark.parametrize(
    ("where", "local", "why"),
    [
        ("auto", GPU0, "the rank's own device"),
        ("most_free", torch.device("cpu"), "the rank's own device, as it has no GPU"),
        ("most_free", GPU0, "the GPU with the most free memory"),
        ("cuda:2", GPU0, "asked for cuda:2"),
    ],
)
def test_choose_device_says_why(where: str, local: torch.device, why: str) -> None:
    assert choose_device(where, local, lambda: {GPU0: 1, GPU1: 2})[1] == why


def test_choose_device_most_free_takes_that_gpu() -> None:
    assert choose("most_free", GPU0, 20 * GB, 70 * GB, 30 * GB) == GPU1


def test_choose_device_most_free_prefers_the_own_gpu_on_a_tie() -> None:
    assert choose("most_free", GPU1, 70 * GB, 70 * GB, 70 * GB) == GPU1


def test_choose_device_most_free_without_a_gpu_is_the_cpu() -> None:
    assert choose("most_free", torch.device("cpu")) == torch.device("cpu")


def test_choose_device_unknown_place_is_refused() -> None:
    with pytest.raises(WanshimError, match=r"'fridge' names no place.*most_free"):
        choose("fridge")


def test_read_checkpoint_counts_elements_and_the_commonest_dtype(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {"a": torch.zeros(10, 10, dtype=torch.bfloat16), "b": torch.zeros(3)}, tmp_path / "1.safetensors"
    )
    safetensors.torch.save_file({"c": torch.zeros(7)}, tmp_path / "2.safetensors")
    assert read_checkpoint(tmp_path, default=torch.float32) == Checkpoint(110, torch.bfloat16)


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        *((dtype, dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)),
        (torch.float8_e4m3fn, torch.uint8),
        (torch.int64, torch.uint8),
    ],
    ids=str,
)
def test_read_checkpoint_names_the_dtype_of_its_weights(
    tmp_path: Path, stored: torch.dtype, found: torch.dtype
) -> None:
    weights = {"a": torch.zeros(1), "b": torch.zeros(10, 10).to(stored)}  # fewer of another dtype come first
    safetensors.torch.save_file(weights, tmp_path / "1.safetensors")
    assert read_checkpoint(tmp_path, default=torch.float32) == Checkpoint(101, found)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
@pytest.mark.parametrize(("default", "elements"), [(torch.float32, 100), (torch.bfloat16, 200)], ids=str)
def test_read_checkpoint_of_a_pickled_one_counts_bytes_unopened(
    tmp_path: Path, name: str, default: torch.dtype, elements: int
) -> None:
    (tmp_path / name).write_bytes(b"x" * 400)
    assert read_checkpoint(tmp_path, default=default) == Checkpoint(elements, default)


def test_read_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WanshimError, match="no weights"):
        read_checkpoint(tmp_path, default=torch.float32)


class Driver(ModuleType):
    """NVIDIA's management library of a machine whose GPUs it counts in another order than this process does."""

    def __init__(self, free: dict[str, int]) -> None:
        super().__init__("pynvml")
        self._free, self.open = free, False

    def nvmlInit(self) -> None:
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.open
        return uuid

    def nvmlDeviceGetMemoryInfo(self, uuid: str) -> SimpleNamespace:
        return SimpleNamespace(free=self._free[uuid], total=80 * GB)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="ab"[index]))


def test_peer_gpu_bytes_are_those_that_are_free_on_each_gpu_of_this_process(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver({"GPU-b": 2 * GB, "GPU-hidden": 9 * GB, "GPU-a": 1 * GB})
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert peer_gpu_bytes() == {GPU0: 1 * GB, GPU1: 2 * GB}
    assert not driver.open


def test_peer_gpu_bytes_that_fail_close_the_driver(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({})
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    with pytest.raises(KeyError):
        peer_gpu_bytes()
    assert not driver.open


class Weights:
    """Held by a reference cycle, as the modules of a model with hooks are."""

    def __init__(self) -> None:
        self.cycle = self


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_give_back_frees_what_a_cycle_holds_and_empties_the_cache_of_that_gpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, emptied = [], []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append((*current, gone())))
    gc.disable()
    try:
        gone = weakref.ref(Weights())
        assert gone() is not None
        give_back(torch.device(device))
    finally:
        gc.enable()
    assert gone() is None
    assert emptied == ([] if device == "cpu" else [(GPU1, None)])  # the weights were free by then
