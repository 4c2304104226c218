"""A pipeline of diffusers that generation over GPUs does not serve says so before its models are loaded, whichever way
it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diffusers import AutoPipelineForText2Image, DiffusionPipeline, FluxPipeline, WanPipeline

import wanshim
from tests.contract.diffusers import wan_pipelines
from wanshim.errors import FeatureUnavailable

FEATURE = "diffusers.generate"
WAYS = (FluxPipeline, DiffusionPipeline, AutoPipelineForText2Image)


def saved(folder: Path, name: str) -> str:
    """A pipeline without files: its transformer cannot be loaded."""
    folder.mkdir(exist_ok=True)
    index = {"_class_name": name, "_diffusers_version": "0.33.0", "transformer": ["diffusers", f"{name}Transformer"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return str(folder)


def activate(patch: pytest.MonkeyPatch, gpus: int, strict: bool) -> None:
    patch.setenv("WANSHIM_GENERATE", str(gpus))
    wanshim.activate(f"none,{FEATURE}", strict=strict)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_under_strict_it_stops_before_a_model_is_loaded(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(monkeypatch, 2, strict=True)
    with pytest.raises(FeatureUnavailable, match="FluxPipeline would run on one GPU: it is none of WanPipeline, Wan"):
        way.from_pretrained(saved(tmp_path, "FluxPipeline"))


@pytest.mark.parametrize("way", [WanPipeline, DiffusionPipeline], ids=lambda way: way.__name__)
def test_served_one_goes_on_and_counts_at_its_call(way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activate(monkeypatch, 2, strict=True)
    with pytest.raises(Exception, match="WanPipelineTransformer"):
        way.from_pretrained(saved(tmp_path, "WanPipeline"))
    assert wanshim.report(strict=False).row(FEATURE).calls == 0


@pytest.mark.parametrize(("gpus", "strict"), [(2, False), (1, True)])
def test_it_loads_as_diffusers_does_and_the_report_says_why(
    gpus: int, strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(monkeypatch, gpus, strict)
    with pytest.raises(Exception, match="FluxPipelineTransformer"):
        DiffusionPipeline.from_pretrained(saved(tmp_path, "FluxPipeline"))
    ((said, times),) = wanshim.report(strict=False).row(FEATURE).fallbacks.items()
    assert said.startswith("FluxPipeline on one GPU, with the script's own offload: it is none of WanPipeline")
    assert times == 1


def test_it_is_in_the_report_beside_one_that_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activate(monkeypatch, 1, strict=False)
    wan_pipelines.generate(wan_pipelines.wan(), "wan", num_inference_steps=1, output_type="latent")
    assert wanshim.report().row(FEATURE).outcome == "not needed in this run"
    with pytest.raises(Exception, match="FluxPipelineTransformer"):
        DiffusionPipeline.from_pretrained(saved(tmp_path, "FluxPipeline"))
    assert wanshim.report().row(FEATURE).outcome.startswith("left to the framework 1 time: FluxPipeline on one GPU")


@pytest.mark.parametrize("served", [False, True])
def test_modular_pipeline_is_served_or_named_before_its_components_are_loaded(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modular = pytest.importorskip("diffusers.modular_pipelines.wan.modular_blocks_wan")
    from diffusers.modular_pipelines.qwenimage import QwenImageAutoBlocks

    activate(monkeypatch, 2, strict=True)
    pipe = (modular.WanBlocks if served else QwenImageAutoBlocks)().init_pipeline()
    if served:
        pipe.load_components(names=[])
        assert wanshim.report(strict=False).row(FEATURE).calls == 0
    else:
        with pytest.raises(FeatureUnavailable, match="of modular pipelines those of Wan are served, and QwenImage"):
            pipe.load_components(names=[])
