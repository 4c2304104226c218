"""The VAEs of diffusers' pipelines, in their own shape with few channels, as `tests.contract.decoding` wants them.

Shapes are those of the published checkpoints: two residual blocks, four levels, two of three downsamplers in time.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.contract.diffusers.vae import decode, encode
from tests.distributed.decoding.tiny import tiny

__all__ = ["CONFIGS", "LATENT_CHANNELS", "PIPELINES", "decode", "encode", "make_vae"]

WAN_2_1, WAN_2_2, QWEN_IMAGE, LAYERED = "wan_2.1", "wan_2.2", "qwen_image", "qwen_image_layered"
_NORM_16, _NORM_48 = ({"latents_mean": [0.0] * size, "latents_std": [1.0] * size} for size in (16, 48))
_SHAPE = {"base_dim": 8, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    WAN_2_1: ("AutoencoderKLWan", {**_SHAPE, **_NORM_16, "z_dim": 16}),
    WAN_2_2: (
        "AutoencoderKLWan",
        {
            **_SHAPE,
            **_NORM_48,
            "z_dim": 48,
            "decoder_base_dim": 12,
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
            "scale_factor_spatial": 16,
        },
    ),
    QWEN_IMAGE: ("AutoencoderKLQwenImage", {**_SHAPE, **_NORM_16, "z_dim": 16}),
    LAYERED: ("AutoencoderKLQwenImage", {**_SHAPE, **_NORM_16, "z_dim": 16, "input_channels": 4}),
}
LATENT_CHANNELS = {name: config["z_dim"] for name, (_, config) in CONFIGS.items()}

# Model as docs/reference/vae_models.md names it -> (its pipeline, the VAE of its checkpoints, whether it makes images).
PIPELINES: dict[str, tuple[str, str, bool]] = {
    "Wan 2.1": ("wan.pipeline_wan:WanPipeline", WAN_2_1, False),
    "Wan 2.2 TI2V-5B": ("wan.pipeline_wan:WanPipeline", WAN_2_2, False),
    "Wan-Animate": ("wan.pipeline_wan_animate:WanAnimatePipeline", WAN_2_1, False),
    "SkyReels-V2": ("skyreels_v2.pipeline_skyreels_v2:SkyReelsV2Pipeline", WAN_2_1, False),
    "Cosmos-Predict 2": ("cosmos.pipeline_cosmos2_video2world:Cosmos2VideoToWorldPipeline", WAN_2_1, False),
    "Cosmos-Predict 2.5": ("cosmos.pipeline_cosmos2_5_predict:Cosmos2_5_PredictBasePipeline", WAN_2_1, False),
    "Cosmos 3": ("cosmos.pipeline_cosmos3_omni:Cosmos3OmniPipeline", WAN_2_2, False),
    "Helios": ("helios.pipeline_helios:HeliosPipeline", WAN_2_1, False),
    "SANA-Video 480p": ("sana_video.pipeline_sana_video:SanaVideoPipeline", WAN_2_1, False),
    "ChronoEdit": ("chronoedit.pipeline_chronoedit:ChronoEditPipeline", WAN_2_1, False),
    "Motif-Video": ("motif_video.pipeline_motif_video:MotifVideoPipeline", WAN_2_1, False),
    "Lucy Edit": ("lucy.pipeline_lucy_edit:LucyEditPipeline", WAN_2_2, False),
    "Bria FIBO": ("bria_fibo.pipeline_bria_fibo:BriaFiboPipeline", WAN_2_2, True),
    "JoyImage-Edit": ("joyimage.pipeline_joyimage_edit:JoyImageEditPipeline", WAN_2_1, True),
    "AnyFlow": ("anyflow.pipeline_anyflow:AnyFlowPipeline", WAN_2_1, False),
    "Qwen-Image": ("qwenimage.pipeline_qwenimage:QwenImagePipeline", QWEN_IMAGE, True),
    "Qwen-Image-Edit": ("qwenimage.pipeline_qwenimage_edit:QwenImageEditPipeline", QWEN_IMAGE, True),
    "Qwen-Image-Layered": ("qwenimage.pipeline_qwenimage_layered:QwenImageLayeredPipeline", LAYERED, True),
    "Krea 2": ("krea2.pipeline_krea2:Krea2Pipeline", QWEN_IMAGE, True),
    "Nucleus-Image": ("nucleusmoe_image.pipeline_nucleusmoe_image:NucleusMoEImagePipeline", QWEN_IMAGE, True),
}


def make_vae(layout: str, dtype: torch.dtype) -> Any:
    import diffusers

    name, config = CONFIGS[layout]
    return tiny(getattr(diffusers, name), config, dtype)
