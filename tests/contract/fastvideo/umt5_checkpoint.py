"""A tiny Wan checkpoint in the diffusers layout that FastVideo reads, random and reproducible.

The configuration files have the fields of the published Wan 2.1 ones; only the sizes are small.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The folder's name lets FastVideo find the preset, and with it the negative prompt, of Wan 2.1.
NAME = "Wan2.1-T2V-1.3B-Diffusers"
SIZES = {"vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
COMPONENTS = {
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
}
SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "_diffusers_version": "0.33.0",
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}


def write(folder: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a checkpoint below `folder` and return its own folder.

    Args:
        dtype: of the text encoder's weights: "float32" or "bfloat16".
    """
    import torch

    root = folder / NAME
    root.mkdir(parents=True, exist_ok=True)
    index = {"_class_name": "WanPipeline", "_diffusers_version": "0.33.0", **COMPONENTS}
    _write_json(root / "model_index.json", index)
    generator = torch.Generator().manual_seed(seed)
    _write_text_encoder(root / "text_encoder", generator, getattr(torch, dtype))
    write_tokenizer(root / "tokenizer")
    _write_json(root / "transformer" / "config.json", {"_class_name": "WanTransformer3DModel"})
    _write_json(root / "scheduler" / "scheduler_config.json", SCHEDULER)
    _write_vae(root / "vae")
    return root


def _write_text_encoder(folder: Path, generator: Any, dtype: Any) -> None:
    """Two shards with an index, as the published encoder has five."""
    import torch
    from safetensors.torch import save_file
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(feed_forward_proj="gated-gelu", dropout_rate=0.1, **SIZES)
    weights = {
        name: (torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5).to(dtype)
        for name, tensor in UMT5EncoderModel(config).state_dict().items()
        if name != "encoder.embed_tokens.weight"  # shared, and stored once
    }
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(weights)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / file, {"format": "pt"})
    where = {name: file for file, members in shards.items() for name in members}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    published = {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "feed_forward_proj": "gated-gelu",
        "is_gated_act": True,
        "dense_act_fn": "gelu_new",
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-06,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "is_encoder_decoder": True,
        "num_decoder_layers": SIZES["num_layers"],
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    _write_json(folder / "config.json", {**published, **SIZES})


def write_tokenizer(folder: Path) -> None:
    """A fast tokenizer: one token a character, and the end token behind, as T5's tokenizer puts it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "</s>", "<unk>", *(chr(code) for code in range(33, 127))]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special)
    fast.save_pretrained(folder)


def _write_vae(folder: Path) -> None:
    """Upstream's own way to the negative prompt loads a whole pipeline, VAE included."""
    from diffusers import AutoencoderKLWan

    AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).save_pretrained(folder)


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
