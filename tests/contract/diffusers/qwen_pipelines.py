"""Tiny random pipelines of every Qwen-Image class that `diffusers.generate` serves, and one call of each."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.contract.diffusers.wan_pipelines import TEXT, picture

KINDS = {
    "text": "QwenImagePipeline",
    "img2img": "QwenImageImg2ImgPipeline",
    "inpaint": "QwenImageInpaintPipeline",
    "edit": "QwenImageEditPipeline",
    "edit_inpaint": "QwenImageEditInpaintPipeline",
    "edit_plus": "QwenImageEditPlusPipeline",
    "layered": "QwenImageLayeredPipeline",
}
TRANSFORMER = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": TEXT,
    "axes_dims_rope": (8, 4, 4),
}


def vae(**changed: Any) -> Any:
    from diffusers import AutoencoderKLQwenImage

    tiny = {"base_dim": 6, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1}
    temporal = {"temperal_downsample": [False, True, True], "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
    return AutoencoderKLQwenImage(**tiny, **temporal, **changed).eval()


def qwen(kind: str = "text") -> Any:
    import diffusers

    torch.manual_seed(0)
    layered = kind == "layered"
    options = {"use_additional_t_cond": True, "use_layer3d_rope": True} if layered else {}
    if not hasattr(diffusers, KINDS[kind]):
        pytest.skip(f"this diffusers has no {KINDS[kind]} yet")
    cls = getattr(diffusers, KINDS[kind])
    bare = {"tokenizer": None, "text_encoder": None}
    bare |= {"processor": None} if "edit" in kind or layered else {}
    pipe = cls(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae(**({"input_channels": 4} if layered else {})),
        transformer=diffusers.QwenImageTransformer2DModel(**TRANSFORMER, **options).eval(),
        **bare,
    )
    if layered:  # which reads the dtype of its text encoder
        pipe.text_encoder = pipe.vae
    pipe.set_progress_bar_config(disable=True)
    return pipe


def small_pictures(patch: pytest.MonkeyPatch) -> None:
    """Let the pipelines that edit a picture scale it to 32x32, not to a million pixels."""
    for kind in ("edit", "edit_inpaint", "edit_plus", "layered"):
        name = f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{kind}"
        if importlib.util.find_spec(name) is None:  # a release before it
            continue
        module = importlib.import_module(name)
        size = len(module.calculate_dimensions(1024, 1.0))
        patch.setattr(module, "calculate_dimensions", lambda *_, size=size: (32, 32, None)[:size])


def skip_mask_of_later_releases(mask: torch.Tensor | None) -> None:
    """Releases before 0.37 fail on padded text; those before 0.38 ignore a negative prompt without a mask."""
    installed = Version(version("diffusers"))
    if mask is None and installed < Version("0.38"):
        pytest.skip("diffusers before 0.38 ignores a negative prompt without a mask")
    if mask is not None and not mask.all() and installed < Version("0.37"):
        pytest.skip("diffusers before 0.37 fails on padded text by itself")


def arguments(kind: str) -> dict[str, Any]:
    """What a call of that pipeline needs beyond `generate`'s."""
    if kind == "text":
        return {}
    if kind == "layered":
        return {"image": picture(0).convert("RGBA"), "prompt": "a picture", "layers": 2, "height": None, "width": None}
    given: dict[str, Any] = {"image": picture(0)}
    if "inpaint" in kind:
        given["mask_image"] = picture(1).convert("L")
    return given


def generate(pipe: Any, kind: str = "text", prompts: int = 1, **changed: Any) -> torch.Tensor:
    """Images (b, 3, 32, 32), or of all layers, of three guided steps; two where a strength skips one."""
    seeded = torch.Generator().manual_seed(1)
    call = {
        "prompt_embeds": torch.randn(prompts, 8, TEXT, generator=seeded),
        "prompt_embeds_mask": torch.ones(prompts, 8, dtype=torch.int64),
        "negative_prompt_embeds": torch.randn(prompts, 5, TEXT, generator=seeded),
        "negative_prompt_embeds_mask": torch.ones(prompts, 5, dtype=torch.int64),
        "true_cfg_scale": 4.0,
        "height": 32,
        "width": 32,
        "num_inference_steps": 3,
        "generator": torch.Generator().manual_seed(2),
        "output_type": "pt",
        **arguments(kind),
        **changed,
    }
    images = pipe(**{name: value for name, value in call.items() if value is not None}).images
    return images if isinstance(images, torch.Tensor) else torch.cat(list(images))
