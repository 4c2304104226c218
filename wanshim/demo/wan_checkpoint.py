"""A tiny Wan checkpoint in DiffSynth's own file layout, random and reproducible.

DiffSynth recognises a checkpoint by a hash of its key names and shapes in `MODEL_CONFIGS`; `register` adds
the hashes of the tiny files there, as a new model would be added, and its loading path stays its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT = {"vocab": 128, "dim": 64, "dim_attn": 64, "dim_ffn": 128, "num_heads": 4, "num_layers": 2, "num_buckets": 32}
DIT = {
    "dim": 96,
    "in_dim": 16,
    "ffn_dim": 192,
    "out_dim": 16,
    "text_dim": 64,
    "freq_dim": 32,
    "eps": 1e-6,
    "patch_size": [1, 2, 2],
    "num_heads": 4,
    "num_layers": 8,
    "has_image_input": False,
}
VAE_DIM = 4


@dataclass(frozen=True)
class CheckpointFiles:
    """Paths of the parts of a checkpoint."""

    folder: Path

    @property
    def dit(self) -> Path:
        return self.folder / "diffusion_pytorch_model.safetensors"

    @property
    def text_encoder(self) -> Path:
        return self.folder / "models_t5_umt5-tiny.safetensors"

    @property
    def vae(self) -> Path:
        return self.folder / "Wan2.1_VAE-tiny.safetensors"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "google" / "umt5-tiny"

    @property
    def models(self) -> list[Path]:
        return [self.dit, self.text_encoder, self.vae]


def tiny_vae() -> Any:
    """DiffSynth's Wan 2.1 VAE, narrower: the same modules at a width the CPU encodes in a moment."""
    from diffsynth.models.wan_video_vae import WanVideoVAE

    vae = WanVideoVAE()
    vae.model = _vae_model()
    return vae


def _vae_model() -> Any:
    from diffsynth.models.wan_video_vae import VideoVAE_

    return VideoVAE_(dim=VAE_DIM, z_dim=16).eval().requires_grad_(False)


def write(folder: Path, *, seed: int = 0, dit: dict[str, Any] | None = None) -> CheckpointFiles:
    """Write DiT, text encoder, VAE and tokenizer; an existing checkpoint in the folder is written anew."""
    import torch
    from diffsynth.models.wan_video_dit import WanModel
    from diffsynth.models.wan_video_text_encoder import WanTextEncoder
    from safetensors.torch import save_file

    files = CheckpointFiles(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    for model, path in (
        (WanModel(**(dit or DIT)), files.dit),
        (WanTextEncoder(**TEXT), files.text_encoder),
        (_vae_model(), files.vae),  # not out of a VAE of full size, which takes a second
    ):
        weights = {name: _random(tensor) for name, tensor in model.state_dict().items()}
        save_file(weights, path)
    write_tokenizer(files.tokenizer)
    return files


def _random(tensor: Any) -> Any:
    """Small noise around the identity of each kind of weight: gains stay near one, so activations stay sane."""
    import torch

    noise = torch.randn(tensor.shape, dtype=torch.float32)
    if tensor.dim() < 2 or tensor.numel() == max(tensor.shape):
        return (tensor.float() + 0.02 * noise).to(torch.bfloat16).contiguous()
    fan_in = tensor[0].numel()
    return (noise * fan_in**-0.5).to(torch.bfloat16).contiguous()


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of characters to a folder, which is made."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    symbols = ["<pad>", "</s>", "<unk>", *(chr(code) for code in range(33, 127))]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))  # noqa: S106 - a token of text
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def register(files: CheckpointFiles, *, dit: dict[str, Any] | None = None) -> None:
    """Teach DiffSynth the hashes of these files. Registering twice changes nothing."""
    from diffsynth.configs.model_configs import MODEL_CONFIGS
    from diffsynth.core.loader import hash_model_file

    known = {config["model_hash"] for config in MODEL_CONFIGS}
    converter = "diffsynth.utils.state_dict_converters.wan_video_vae.WanVideoVAEStateDictConverter"
    for path, name, model_class, kwargs, more in (
        (files.dit, "dit", "diffsynth.models.wan_video_dit.WanModel", dit or DIT, {}),
        (files.text_encoder, "text_encoder", "diffsynth.models.wan_video_text_encoder.WanTextEncoder", TEXT, {}),
        (files.vae, "vae", f"{__name__}.tiny_vae", {}, {"state_dict_converter": converter}),
    ):
        digest = hash_model_file(str(path))
        entry = {"model_hash": digest, "model_name": f"wan_video_{name}", "model_class": model_class}
        if digest not in known:
            MODEL_CONFIGS.append({**entry, "extra_kwargs": kwargs, **more})
