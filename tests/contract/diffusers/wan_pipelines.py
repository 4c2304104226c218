"""Tiny random pipelines of every class that `diffusers.generate` serves, and one call of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TEXT = 16
TRANSFORMER = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TEXT,
    "freq_dim": 256,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}


def _vae() -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()


def _scheduler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=7.0)


def _dit(**changed: Any) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**{**TRANSFORMER, **changed}).eval()


def _made(cls: str, **parts: Any) -> Any:
    import diffusers

    bare = {"tokenizer": None, "text_encoder": None, "vae": _vae(), "scheduler": _scheduler()}
    pipe = getattr(diffusers, cls)(**{**bare, **parts})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(seed: int, size: tuple[int, int] = (32, 32)) -> Any:
    from PIL import Image

    noise = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.to(torch.uint8).numpy())


def wan() -> Any:
    torch.manual_seed(0)
    return _made("WanPipeline", transformer=_dit())


def wan22() -> Any:
    torch.manual_seed(0)
    return _made("WanPipeline", transformer=_dit(), transformer_2=_dit(), boundary_ratio=0.9)


def ti2v() -> Any:
    torch.manual_seed(0)
    return _made("WanPipeline", transformer=_dit(), expand_timesteps=True)


def i2v() -> Any:
    torch.manual_seed(0)
    return _made("WanImageToVideoPipeline", transformer=_dit(in_channels=36))


def i2v_ti2v() -> Any:
    torch.manual_seed(0)
    return _made("WanImageToVideoPipeline", transformer=_dit(), expand_timesteps=True)


def v2v() -> Any:
    torch.manual_seed(0)
    return _made("WanVideoToVideoPipeline", transformer=_dit())


def vace() -> Any:
    from diffusers import WanVACETransformer3DModel

    torch.manual_seed(0)
    return _made(
        "WanVACEPipeline",
        transformer=WanVACETransformer3DModel(**TRANSFORMER, vace_layers=[0], vace_in_channels=96).eval(),
    )


def animate() -> Any:
    from diffusers import WanAnimateTransformer3DModel
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    channels = {str(size): 16 for size in (4, 8, 16)}
    dit = WanAnimateTransformer3DModel(
        **{**TRANSFORMER, "in_channels": 36},
        latent_channels=16,
        image_dim=4,
        motion_encoder_channel_sizes=channels,
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    clip = CLIPVisionConfig(
        hidden_size=4,
        projection_dim=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=4,
        intermediate_size=16,
        patch_size=1,
    )
    return _made(
        "WanAnimatePipeline",
        transformer=dit.eval(),
        image_processor=CLIPImageProcessor(crop_size=4, size=4),
        image_encoder=CLIPVisionModel(clip).eval(),
    )


MADE: dict[str, Callable[[], Any]] = {
    "wan": wan,
    "wan22": wan22,
    "ti2v": ti2v,
    "i2v": i2v,
    "i2v_ti2v": i2v_ti2v,
    "v2v": v2v,
    "vace": vace,
    "animate": animate,
}


def arguments(kind: str) -> dict[str, Any]:
    """What a call of that pipeline needs beyond `generate`'s."""
    clip = [picture(seed) for seed in range(5)]
    if kind.startswith("i2v"):
        return {"image": picture(0)}
    if kind in ("v2v", "vace"):
        return {"video": clip} | ({"num_frames": 5} if kind == "vace" else {})
    if kind == "animate":
        faces = [picture(9, (16, 16))] * 5
        return {"image": picture(0), "pose_video": clip, "face_video": faces, "segment_frame_length": 5}
    return {}


def generate(pipe: Any, kind: str, prompts: int = 1, **changed: Any) -> torch.Tensor:
    """Frames (b, f, 3, 32, 32) of three guided steps."""
    seeded = torch.Generator().manual_seed(1)
    size = {} if kind == "animate" or "num_frames" in changed else {"num_frames": 5}
    call = {
        "prompt_embeds": torch.randn(prompts, 8, TEXT, generator=seeded).to(pipe._execution_device),
        "negative_prompt_embeds": torch.randn(prompts, 8, TEXT, generator=seeded).to(pipe._execution_device),
        "height": 32,
        "width": 32,
        "num_inference_steps": 3,
        "guidance_scale": 5.0,
        "generator": torch.Generator().manual_seed(2),
        "output_type": "pt",
        **({} if kind == "v2v" else size),
        **arguments(kind),
        **changed,
    }
    return pipe(**call).frames


def lose_a_connection() -> None:
    """The next time that a VAE's processes connect, this process, which may be a worker, fails."""
    from wanshim.core.decoding.ranks.exchange import Comm, PeerLost

    own = Comm.connect

    def lost(comm: Comm) -> None:
        Comm.connect = own  # type: ignore[method-assign]
        raise PeerLost("connect", "no memory for it")

    Comm.connect = lost  # type: ignore[method-assign]


def compute_otherwise() -> None:
    """In this process, which is a worker, normalization has another result."""
    from diffusers.models.normalization import FP32LayerNorm

    own = FP32LayerNorm.forward
    FP32LayerNorm.forward = lambda self, inputs: 1.5 * own(self, inputs)
