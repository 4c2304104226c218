"""A plan of training touches nothing of a script that generates: the DiT is put where the script asked, and on several
processes the command that generates is named before the denoising."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline

import wanshim
from tests.contract.diffsynth import clip_job
from wanshim.adapters.diffsynth.splitting import low_precision
from wanshim.demo import wan_checkpoint
from wanshim.errors import FeatureUnavailable

FEATURE = "diffsynth.model_split"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> wan_checkpoint.CheckpointFiles:
    made = wan_checkpoint.write(tmp_path_factory.mktemp("checkpoint"))
    wan_checkpoint.register(made)
    return made


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """DiTs that were placed, and where."""
    found: list[tuple[Any, Any]] = []
    monkeypatch.setattr(low_precision, "place_as_asked", lambda dit, device: found.append((dit, device)))
    monkeypatch.setenv("WANSHIM_PLAN", "auto")
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu")
    return found


def pipeline(files: wan_checkpoint.CheckpointFiles) -> Any:
    wanshim.activate(f"none,{FEATURE}")
    return WanVideoPipeline.from_pretrained(
        torch_dtype=torch.bfloat16, device="cpu", model_configs=[ModelConfig(path=str(path)) for path in files.models],
        tokenizer_config=ModelConfig(path=str(files.tokenizer)), redirect_common_files=False,
    )  # fmt: skip


def generate(pipe: Any) -> Any:
    return pipe(
        prompt="a clip", seed=1, height=32, width=48, num_frames=5, num_inference_steps=2, tiled=False, cfg_scale=1.0
    )


def notes() -> str:
    return "\n".join(wanshim.report(strict=False).row(FEATURE).notes)


@pytest.mark.slow
def test_dit_is_placed_when_the_pipeline_generates(
    files: wan_checkpoint.CheckpointFiles, placed: list[tuple[Any, Any]]
) -> None:
    pipe = pipeline(files)
    assert not placed
    assert len(generate(pipe)) == 5
    generate(pipe)
    assert placed == [(pipe.dit, "cpu")]
    assert "wanshim generate --gpus N" in notes()


@pytest.mark.slow
def test_training_does_not_place_it(
    files: wan_checkpoint.CheckpointFiles, placed: list[tuple[Any, Any]], tmp_path: Path
) -> None:
    wanshim.activate(f"none,{FEATURE}")
    clip_job.train(clip_job.make_module(files), tmp_path)
    assert not placed


def test_several_processes_are_told_the_command_before_they_denoise(
    files: wan_checkpoint.CheckpointFiles, placed: list[tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", "sequence")
    monkeypatch.delenv("WANSHIM_DEVICES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    pipe = pipeline(files)
    forwards: list[int] = []
    pipe.dit.register_forward_hook(lambda *_: forwards.append(1))
    with pytest.raises(FeatureUnavailable, match=r"wanshim generate --gpus 2 -- python"):
        generate(pipe)
    assert not forwards
    assert not placed
