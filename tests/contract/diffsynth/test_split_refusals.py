"""What does not go with a split is refused with the reason: before anything is loaded, or before it trains."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diffsynth.pipelines import wan_video

import wanshim
from tests.contract.diffsynth import training
from wanshim.adapters.diffsynth.splitting.wan import FAMILY
from wanshim.core.model_split import split_of
from wanshim.errors import FeatureUnavailable

FEATURE = "diffsynth.model_split"


@pytest.fixture(autouse=True)
def _active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.activate(f"none,{FEATURE}")


def accelerator(**plugins: Any) -> Any:
    """Stands for an Accelerator made with DeepSpeed or FSDP, neither of which comes up without GPUs. The refusal
    must come before anything else is asked of it."""
    return SimpleNamespace(state=SimpleNamespace(**plugins), num_processes=1)


OFFLOAD = argparse.Namespace(enable_model_cpu_offload=True)
CONFLICTS = [
    pytest.param({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, None, "DeepSpeed places the param", id="zero3"),
    pytest.param({"fsdp_plugin": SimpleNamespace()}, None, "FSDP places the parameters itself", id="fsdp"),
    pytest.param({}, OFFLOAD, "--enable_model_cpu_offload streams the whole model", id="offload"),
]


@pytest.mark.parametrize("split_before", [False, True])
@pytest.mark.parametrize(("plugins", "args", "reason"), CONFLICTS)
def test_training_that_places_the_model_itself_is_refused(
    tmp_path: Path, plugins: dict[str, Any], args: Any, reason: str, split_before: bool
) -> None:
    from diffsynth.diffusion import runner

    module = training.Training()
    if split_before:
        FAMILY.split(module.pipe, ("cpu", "cpu"))
    with pytest.raises(FeatureUnavailable, match=reason):
        runner.launch_training_task(
            accelerator(**plugins), training.Samples(), module, training.Logger(tmp_path), args=args
        )
    assert (split_of(module.pipe.dit) is not None) is split_before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
def test_plan_is_refused_when_wanshim_is_activated_where_accelerate_has_an_engine(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """As in a process of `accelerate launch`; with WANSHIM_PLAN=auto DiffSynth trains as it would, and that is said."""
    monkeypatch.delenv("WANSHIM_DEVICES")
    monkeypatch.setenv("WANSHIM_PLAN", "auto")
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    monkeypatch.setenv("LOCAL_RANK", "0")
    wanshim.activate(f"none,{FEATURE}")
    for plan in ("sequence", "stream", "split"):
        monkeypatch.setenv("WANSHIM_PLAN", plan)
        with pytest.raises(FeatureUnavailable, match="and WANSHIM_PLAN each take over the parameters: leave"):
            wanshim.activate(f"none,{FEATURE}")


def test_sequence_parallelism_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        wan_video.WanVideoPipeline, "download_and_load_models", lambda *_, **__: pytest.fail("it loads")
    )
    with pytest.raises(FeatureUnavailable, match="use_usp: sequence parallelism needs the whole model on every GPU"):
        wan_video.WanVideoPipeline.from_pretrained(use_usp=True, device="cpu")


def test_sequence_parallelism_without_strict_goes_on_unsplit_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def load(*_: Any, **__: Any) -> None:
        raise Reached

    wanshim.activate(f"none,{FEATURE}", strict=False)
    monkeypatch.setattr(wan_video.WanVideoPipeline, "download_and_load_models", load)
    # DiffSynth's own needs a process group of GPUs and yunchang's kernels
    stub = SimpleNamespace(initialize_usp=lambda *_: None)
    monkeypatch.setitem(sys.modules, "diffsynth.utils.xfuser", stub)
    with pytest.raises(Reached):
        wan_video.WanVideoPipeline.from_pretrained(use_usp=True, device="cpu")
    row = wanshim.report().row(FEATURE)
    assert row.state == "ineffective"
    assert any("not split: use_usp" in reason for reason in row.fallbacks)
