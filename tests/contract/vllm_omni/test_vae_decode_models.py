"""Every model of vLLM-Omni that docs/reference/vae_models.md names: which VAE its pipeline loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanshim.patching import SourceTree

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "vae_models.md"
WAN, QWEN_IMAGE, PLAIN = "DistributedAutoencoderKLWan", "DistributedAutoencoderKLQwenImage", "AutoencoderKLWan"
# Model as the page names it -> (its pipeline, what that imports, whether the executor's class is it).
PIPELINES = {
    "Wan 2.2": ("wan2_2.pipeline_wan2_2", WAN),
    "Cosmos 3": ("cosmos3.pipeline_cosmos3", WAN),
    "LingBot-World": ("lingbot_world.pipeline", WAN),
    "SANA-Video": ("sana_video.pipeline_sana_video", WAN),
    "LongCat-Video": ("longcat_video.pipeline_longcat_video_avatar", WAN),
    "DreamZero": ("dreamzero.pipeline_dreamzero", WAN),
    "Qwen-Image": ("qwen_image.pipeline_qwen_image", QWEN_IMAGE),
    "Krea 2": ("krea2.pipeline_krea2", QWEN_IMAGE),
    "Anima": ("anima.pipeline_anima", QWEN_IMAGE),
    "Ming-Image": ("ming_image.pipeline", QWEN_IMAGE),
    "Helios": ("helios.pipeline_helios", PLAIN),
    "LingBot-Video": ("lingbot_video.pipeline_lingbot_video", PLAIN),
}


@pytest.mark.parametrize("model", PIPELINES)
def test_pipeline_of_the_model_loads_the_vae_that_the_page_says(model: str) -> None:
    name, cls = PIPELINES[model]
    file = SourceTree.of_installed("vllm_omni").file_of(f"vllm_omni.diffusion.models.{name}")
    if file is None:
        pytest.skip(f"this release has no {name}")
    text = file.read_text(encoding="utf-8")
    assert f"{cls}.from_pretrained(" in text or f"{cls}," in text or f"import {cls}" in text
    assert (cls == PLAIN) is ("Distributed" not in text)
    assert model in PAGE.read_text(encoding="utf-8")
