"""A tiny Wan checkpoint on disk, complete enough for vLLM-Omni's pipelines to build themselves from it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.distributed.decoding.tiny import make_vae

WORDS = ["<pad>", "</s>", "<unk>", "a", "cat"]


def write_model(folder: Path, pipeline: str) -> Path:
    """Write the checkpoint of `pipeline`; weights of the transformer are not read when a pipeline is built."""
    index = {
        "_class_name": pipeline,
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "image_encoder": [None, None],
        "boundary_ratio": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer").mkdir(exist_ok=True)
    (folder / "transformer" / "config.json").write_text(json.dumps({"in_channels": 4, "out_channels": 4}))
    make_vae("2.1", torch.float32).save_pretrained(folder / "vae")
    _write_text_side(folder)
    return folder


def _write_text_side(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "tokenizer")
    config = UMT5Config(vocab_size=len(WORDS), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
