"""Wan 2.2 TI2V-5B with its own file names and architecture at a size that a CPU trains in a moment, random."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from wanshim.demo import wan_checkpoint

# What DiffSynth's MODEL_CONFIGS has for TI2V-5B, narrower and with two blocks.
SIZES = {"dim": 96, "ffn_dim": 192, "text_dim": 64, "freq_dim": 32, "num_heads": 4, "num_layers": 2}
LATENTS = {"in_dim": 48, "out_dim": 48, "patch_size": [1, 2, 2], "eps": 1e-6}
KIND = {
    "has_image_input": False,
    "seperated_timestep": True,
    "fuse_vae_embedding_in_latents": True,
    "require_clip_embedding": False,
    "require_vae_embedding": False,
}
DIT: dict[str, Any] = SIZES | LATENTS | KIND
# Where DiffSynth looks for the parts of TI2V-5B: it fetches encoder and VAE from a repository of its own.
CONVERTED = "DiffSynth-Studio/Wan-Series-Converted-Safetensors"
FILES = {
    "wan_video_dit": "Wan-AI/Wan2.2-TI2V-5B/diffusion_pytorch_model-00001-of-00001.safetensors",
    "wan_video_text_encoder": f"{CONVERTED}/models_t5_umt5-xxl-enc-bf16.safetensors",
    "wan_video_vae": f"{CONVERTED}/Wan2.2_VAE.safetensors",
}
TOKENIZER = "Wan-AI/Wan2.1-T2V-1.3B/google/umt5-xxl"


def tiny_vae() -> Any:
    """DiffSynth's Wan 2.2 VAE with 16 channels where the published one has 160 and 256."""
    from diffsynth.models import wan_video_vae as code

    with mock.patch.object(code, "VideoVAE38_", partial(code.VideoVAE38_, dec_dim=16)):
        return code.WanVideoVAE38(dim=16)


def write(hub: Path) -> None:
    """Write the files of `FILES` and the tokenizer below `hub`."""
    from safetensors.torch import save_file

    parts = wan_checkpoint.write(hub / "parts", dit=DIT)
    vae = hub / "parts" / "vae"
    save_file(tiny_vae().model.bfloat16().state_dict(), vae)
    written = dict(zip(FILES, (parts.dit, parts.text_encoder, vae))) | {"tokenizer": parts.tokenizer}
    for name, path in written.items():
        target = hub / FILES.get(name, TOKENIZER)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)


def register(configs: Any, models: Path = Path("models")) -> None:
    """Teach DiffSynth the hashes of the files below `models`, in the module `diffsynth.configs.model_configs`."""
    from diffsynth.core.loader import hash_model_file

    classes = {
        "wan_video_dit": ("diffsynth.models.wan_video_dit.WanModel", DIT),
        "wan_video_text_encoder": ("diffsynth.models.wan_video_text_encoder.WanTextEncoder", wan_checkpoint.TEXT),
        "wan_video_vae": (f"{__name__}.tiny_vae", {}),
    }
    for name, (model_class, arguments) in classes.items():
        entry = {"model_hash": hash_model_file(str(models / FILES[name])), "model_name": name}
        entry |= {"model_class": model_class, "extra_kwargs": arguments}
        if name == "wan_video_vae":
            converters = "diffsynth.utils.state_dict_converters.wan_video_vae"
            entry["state_dict_converter"] = f"{converters}.WanVideoVAEStateDictConverter"
        configs.MODEL_CONFIGS.append(entry)
