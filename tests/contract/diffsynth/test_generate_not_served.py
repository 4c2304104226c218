"""A pipeline of DiffSynth that generation over GPUs does not serve says so before its models are loaded."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from diffsynth import pipelines
from diffsynth.core import ModelConfig
from diffsynth.diffusion.base_pipeline import BasePipeline
from diffsynth.pipelines.flux_image import FluxImagePipeline
from diffsynth.pipelines.wan_video import WanVideoPipeline

import wanshim
from wanshim.errors import FeatureUnavailable

FEATURE = "diffsynth.generate"
SERVED = "of DiffSynth's pipelines MiniMaxH3Pipeline and WanVideoPipeline are served"


def load(cls: Any) -> Any:
    return cls.from_pretrained(device="cpu", model_configs=[ModelConfig(path="no such file")])


def activate(patch: pytest.MonkeyPatch, gpus: int, strict: bool) -> None:
    patch.setenv("WANSHIM_GENERATE", str(gpus))
    wanshim.activate(f"none,{FEATURE}", strict=strict)


def test_under_strict_it_stops_before_a_file_is_opened_and_a_served_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activate(monkeypatch, 2, strict=True)
    with pytest.raises(FeatureUnavailable, match=f"FluxImagePipeline would run on one GPU: {SERVED}"):
        load(FluxImagePipeline)
    with pytest.raises(FileNotFoundError):
        load(WanVideoPipeline)
    assert wanshim.report(strict=False).row(FEATURE).calls == 1  # a served pipeline counts at its call


@pytest.mark.parametrize(("gpus", "strict"), [(2, False), (1, True)])
def test_it_loads_as_the_framework_does_and_the_report_says_why(
    gpus: int, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(monkeypatch, gpus, strict)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            load(FluxImagePipeline)
    ((said, times),) = wanshim.report(strict=False).row(FEATURE).fallbacks.items()
    assert said.startswith("FluxImagePipeline on one GPU, with the script's own offload: of DiffSynth's pipelines")
    assert times == 1


SCRIPT = """
from diffsynth.pipelines.flux_image import FluxImagePipeline, ModelConfig

try:
    FluxImagePipeline.from_pretrained(device="cpu", model_configs=[ModelConfig(path="no such file")])
except FileNotFoundError:
    print("DiffSynth's own error")
"""


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_user_s_script_is_told_by_one_command(strict: str, tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    clean |= {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(Path(__file__).parents[3]), "WANSHIM_STRICT": strict}
    done = subprocess.run(
        [sys.executable, "-m", "wanshim", "generate", "--gpus", "2", "--", sys.executable, "generate.py"],
        cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert (done.returncode == 0) == (strict == "0"), done.stderr
    assert ("DiffSynth's own error" in done.stdout) == (strict == "0")
    assert SERVED in done.stderr


def classes() -> Iterator[Any]:
    """Every pipeline of the installed release whose module can be imported here."""
    for found in pkgutil.iter_modules(pipelines.__path__):
        try:
            module = importlib.import_module(f"{pipelines.__name__}.{found.name}")
        except ImportError:
            continue
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, BasePipeline) and cls.__module__ == module.__name__:
                yield cls


@pytest.mark.slow
@pytest.mark.sweep
def test_every_pipeline_that_is_not_served_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    activate(monkeypatch, 2, strict=True)
    said = {}
    for cls in classes():
        with pytest.raises((FeatureUnavailable, FileNotFoundError)) as caught:
            load(cls)
        said[cls.__name__] = str(caught.value)
    assert len(said) > 2
    served = {name for name, text in said.items() if not text.startswith(f"{name} would run on one GPU")}
    assert served == {"MiniMaxH3Pipeline", "WanVideoPipeline"} & said.keys()
