"""Weights counted from the checkpoint's header before anything is loaded: the bytes they take, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffsynth.models import model_loader
from safetensors.torch import save_file

import wanshim
from tests.contract.diffsynth import flux2, variants
from tests.contract.diffsynth.clip_job import FEATURE, make_module
from wanshim.adapters.diffsynth.splitting import flux2 as flux2_table
from wanshim.adapters.diffsynth.splitting import load, wan
from wanshim.core.shared.safetensors_header import Header, read_header
from wanshim.core.shared.weight_bytes import num_bytes
from wanshim.core.strategy.loading import StoredModel, check_weights
from wanshim.demo import wan_checkpoint
from wanshim.errors import PlacementInvalid

BFLOAT16 = {"offload_dtype": None, "computation_dtype": torch.bfloat16}
FAMILIES = {"flux2": flux2_table.FAMILY}


def stored(header: Header, matrices: int, devices: tuple[str, ...], points: tuple[int, ...] | None) -> StoredModel:
    return StoredModel(name="it", header=header, itemsize=2, matrix_itemsize=matrices, devices=devices, split_at=points)


@pytest.mark.parametrize("name", ["t2v", "s2v", "wantodance", "flux2"])
def test_header_counts_the_bytes_of_each_stage(tmp_path: Path, name: str) -> None:
    model = flux2.tiny() if name == "flux2" else variants.tiny(name).dit
    state = {key: value.clone() for key, value in model.state_dict().items()}
    half = dict(list(state.items())[::2])
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    save_file(half, paths[0])
    save_file({key: value for key, value in state.items() if key not in half}, paths[1])
    family = FAMILIES.get(name, wan.FAMILY)
    header = read_header(paths, family.blocks)
    assert isinstance(header, Header)
    blocks = [block for path in family.blocks for block in model.get_submodule(path)]
    assert [block.bytes_at(4) for block in header.blocks] == [
        sum(4 * t.numel() for t in b.state_dict().values()) for b in blocks
    ]
    needed = stored(header, 2, ("cpu", "cpu:0"), (3,)).bytes_by_device
    model.to(torch.bfloat16)
    assert needed["cpu:0"] == sum(map(num_bytes, blocks[3:]))


def test_file_without_a_header_or_blocks_is_not_counted(tmp_path: Path) -> None:
    assert read_header([tmp_path / "model.pth"], ("blocks",)) is None
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "vae.safetensors")
    assert read_header([tmp_path / "vae.safetensors"], ("blocks",)) is None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> wan_checkpoint.CheckpointFiles:
    made = wan_checkpoint.write(tmp_path_factory.mktemp("checkpoint"))
    wan_checkpoint.register(made)
    return made


def limit(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A host has no limit of its own: this one stands for each of two cards."""
    monkeypatch.setattr("wanshim.core.strategy.limits.available_bytes", lambda device: count)


def test_weights_that_cannot_fit_are_refused_before_they_are_loaded(
    files: wan_checkpoint.CheckpointFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = model_loader.load_model
    monkeypatch.setattr(model_loader, "load_model", lambda c, *a, **k: (loaded.append(c.__name__), load(c, *a, **k))[1])
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu:0")
    wanshim.activate(f"none,{FEATURE}")
    limit(monkeypatch, 1000)
    with pytest.raises(PlacementInvalid) as caught:
        make_module(files)
    assert "WanModel" not in loaded
    assert "the weights do not fit, and were not loaded: cpu would need 1." in str(caught.value)
    assert "of 0.00 MiB" in str(caught.value)
    assert "WANSHIM_PLAN=stream" in str(caught.value)


def test_refusal_proposes_what_would_fit(files: wan_checkpoint.CheckpointFiles) -> None:
    devices, family = ("cpu", "cpu:0"), wan.FAMILY
    header = read_header([files.dit], family.blocks)
    assert header is not None
    read = wanshim.settings.read({"WANSHIM_SPLIT_AT": "7"})
    needs = {
        way: max(stored(header, matrices, devices, points).bytes_by_device.values())
        for way, matrices, points in (("as asked", 2, (7,)), ("balanced", 2, None), ("fp8", 1, (7,)))
    }
    assert needs["fp8"] < needs["balanced"] < needs["as asked"]

    def hint(available: int) -> str:
        model = load._stored_model(family, [files.dit], BFLOAT16, None, devices, read)
        assert model is not None
        with pytest.raises(PlacementInvalid) as caught:
            check_weights(model, dict.fromkeys(devices, available))
        return str(caught.value).partition("What would fit")[2]

    both = hint(needs["balanced"])
    assert "without WANSHIM_SPLIT_AT: balanced by bytes" in both
    assert "an fp8 base: WANSHIM_BASE=float8;" in both
    assert "an fp8 base" in (low := hint(needs["fp8"]))
    assert "balanced by bytes" not in low
    model = load._stored_model(family, [files.dit], BFLOAT16, None, devices, read)
    assert model is not None
    check_weights(model, dict.fromkeys(devices, needs["as asked"]))


@pytest.mark.parametrize(
    ("config", "quantize", "base", "expected"),
    [
        (BFLOAT16, None, None, (2, 2)),
        ({"offload_dtype": torch.float8_e4m3fn}, None, None, (1, 1)),
        (BFLOAT16, object(), None, (2, 1)),
        (BFLOAT16, None, "float8", (2, 1)),
    ],
    ids=["bf16", "fp8_models", "quant_options", "base"],
)
def test_bytes_are_those_of_the_dtype_that_will_be_stored(
    files: wan_checkpoint.CheckpointFiles,
    config: dict[str, Any],
    quantize: object,
    base: str | None,
    expected: tuple[int, int],
) -> None:
    read = wanshim.settings.Settings(base=base)
    model = load._stored_model(wan.FAMILY, [files.dit], config, quantize, ("cpu", "cpu:0"), read)
    assert model is not None
    assert (model.itemsize, model.matrix_itemsize) == expected
