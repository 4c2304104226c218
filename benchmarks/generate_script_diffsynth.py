"""A user's script for DiffSynth that knows nothing of wanshim: the 14B Wan DiT with random weights, three calls of two
sizes.

    python benchmarks/generate_script_diffsynth.py none 3
    python benchmarks/generate_script_diffsynth.py host 3 --vram-limit 8
    wanshim generate --gpus 1 -- python benchmarks/generate_script_diffsynth.py host 3 --vram-limit 8 --limit 8

The first argument says how it keeps the DiT: none, all on the GPU; host, by DiffSynth's VRAM management in host memory,
of which layers stay on the GPU until it has `--vram-limit` GiB. `--limit` holds torch's allocator to so many GiB once
the models are made. It prints, of each call, seconds, the digest of its frames and the peak in GiB of its own GPU.
"""

import argparse
import hashlib
import json
import time
from typing import Any

import torch
from diffsynth.core.vram.layers import enable_vram_management
from diffsynth.models.model_loader import ModelPool
from diffsynth.models.wan_video_dit import WanModel
from diffsynth.models.wan_video_text_encoder import WanTextEncoder
from diffsynth.models.wan_video_vae import WanVideoVAE
from diffsynth.pipelines.wan_video import WanVideoPipeline

parser = argparse.ArgumentParser()
parser.add_argument("keep", choices=("none", "host"))
parser.add_argument("steps", type=int)
parser.add_argument("--vram-limit", type=float)
parser.add_argument("--limit", type=float)
parser.add_argument("--small", action="store_true", help="tiny models and videos, to try it on any machine")
given = parser.parse_args()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = ((32, 32, 5), (32, 48, 9)) if given.small else ((480, 832, 81), (480, 832, 81), (272, 480, 33))
DIT = {"dim": 5120, "ffn_dim": 13824, "text_dim": 4096, "freq_dim": 256, "num_heads": 40, "num_layers": 40}
SMALL_DIT = {"dim": 60, "ffn_dim": 64, "text_dim": 64, "freq_dim": 16, "num_heads": 5, "num_layers": 4}
TEXT = {"vocab": 64, "dim_attn": 64, "dim_ffn": 64, "num_heads": 2, "num_layers": 1, "dropout": 0.0}


def made(cls: Any, **config: Any) -> Any:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        torch.manual_seed(0)
        model = cls(**config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    return model


def tokenizer(text: str, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of one that is loaded."""
    ids = torch.zeros(1, 512, dtype=torch.long)
    ids[0, : len(text)] = torch.tensor([ord(letter) % 64 for letter in text])
    return ids, (ids > 0).long()


def pipeline() -> Any:
    sizes = SMALL_DIT if given.small else DIT
    pipe = WanVideoPipeline(device=DEVICE, torch_dtype=torch.bfloat16)
    pipe.tokenizer = tokenizer
    pipe.text_encoder = made(WanTextEncoder, dim=sizes["text_dim"], **TEXT)
    pipe.vae = made(WanVideoVAE)
    pipe.vae_output_to_video = lambda video: video
    pipe.dit = made(WanModel, in_dim=16, out_dim=16, eps=1e-6, patch_size=(1, 2, 2), has_image_input=False, **sizes)
    if given.keep == "host":
        if not hasattr(torch.cpu, "empty_cache"):  # DiffSynth calls it for any device
            torch.cpu.empty_cache = lambda: None
        pipe.dit.to("cpu")
        dtypes = {f"{state}_dtype": torch.bfloat16 for state in ("offload", "onload", "preparing", "computation")}
        places = {"offload_device": "cpu", "onload_device": "cpu"}
        config = {**dtypes, **places, "preparing_device": DEVICE, "computation_device": DEVICE}
        layers = ModelPool().fetch_module_map("diffsynth.models.wan_video_dit.WanModel", config)
        enable_vram_management(pipe.dit, layers, vram_config=config, vram_limit=given.vram_limit)
        pipe.vram_management_enabled = pipe.check_vram_management_state()
    return pipe


start = time.perf_counter()
pipe = pipeline()
made_in = time.perf_counter() - start
if DEVICE == "cuda":
    torch.cuda.empty_cache()
    if given.limit:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.limit * 2**30 / whole)
calls = []
for height, width, frames in SIZES:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    video = pipe(
        prompt="a street",
        negative_prompt="blur",
        seed=0,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=given.steps,
        tiled=False,
    )
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None
    digest = hashlib.sha256(video.float().cpu().numpy()).hexdigest()[:12]
    calls.append({"size": [height, width, frames], "seconds": seconds, "frames": digest, "peak_GiB": peak})
name = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
row = {"keep": given.keep, "vram_limit_GiB": given.vram_limit, "limit_GiB": given.limit, "made_s": made_in}
print(json.dumps({"gpu": name, "torch": torch.__version__, **row, "calls": calls}))
