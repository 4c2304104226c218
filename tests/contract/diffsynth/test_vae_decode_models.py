"""Every model of DiffSynth that docs/reference/vae_models.md names loads a VAE that the features patch."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanshim.patching import SourceTree

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "vae_models.md"
# Model as the page names it -> (its pipeline, the VAE that it fetches).
PIPELINES = {
    "Wan 2.1 and 2.2": ("wan_video", "wan_video_vae"),
    "MOVA": ("mova_audio_video", "wan_video_vae"),
    "Anima": ("anima_image", "wan_video_vae"),
    "JoyAI-Image": ("joyai_image", "wan_video_vae"),
    "Qwen-Video-Edit": ("qwen_video_edit", "wan_video_vae"),
    "Qwen-Image": ("qwen_image", "qwen_image_vae"),
    "Krea 2": ("krea2", "qwen_image_vae"),
    "LingBot-Video": ("lingbot_video", "qwen_image_vae"),
}


@pytest.mark.parametrize("model", PIPELINES)
def test_pipeline_of_the_model_fetches_a_vae_that_is_shared(model: str) -> None:
    name, vae = PIPELINES[model]
    file = SourceTree.of_installed("diffsynth").file_of(f"diffsynth.pipelines.{name}")
    if file is None:
        pytest.skip(f"this release has no {name}")
    assert f'fetch_model("{vae}")' in file.read_text(encoding="utf-8")
    assert model in PAGE.read_text(encoding="utf-8")


def test_models_that_fetch_another_vae_are_named_as_not_shared() -> None:
    file = SourceTree.of_installed("diffsynth").file_of("diffsynth.pipelines.qwen_image_21")
    if file is None:
        pytest.skip("this release has no Qwen-Image 2.1")
    assert 'fetch_model("qwen_image_21_vae")' in file.read_text(encoding="utf-8")
    assert "QwenImage21VAE" in PAGE.read_text(encoding="utf-8")
