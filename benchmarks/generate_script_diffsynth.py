"""A user's script for DiffSynth that knows nothing of wanshim: the 14B Wan DiT, or MiniMax-H3's of 32 billion
parameters, with random weights, three calls of two sizes.

    python benchmarks/generate_script_diffsynth.py none 3
    python benchmarks/generate_script_diffsynth.py host 3 --vram-limit 8
    wanshim generate --gpus 1 -- python benchmarks/generate_script_diffsynth.py host 3 --vram-limit 8 --limit 8
    wanshim generate --gpus 1 -- python benchmarks/generate_script_diffsynth.py host 3 --model minimax_h3 --limit 24

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

parser = argparse.ArgumentParser()
parser.add_argument("keep", choices=("none", "host"))
parser.add_argument("steps", type=int)
parser.add_argument("--model", choices=("wan", "minimax_h3"), default="wan")
parser.add_argument("--vram-limit", type=float)
parser.add_argument("--limit", type=float)
parser.add_argument("--small", action="store_true", help="tiny models and videos, to try it on any machine")
given = parser.parse_args()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "wan": ((480, 832, 81), (480, 832, 81), (272, 480, 33)),
    "minimax_h3": ((480, 832, 124), (480, 832, 124), (288, 480, 39)),
}[given.model]
WAN = {"dim": 5120, "ffn_dim": 13824, "text_dim": 4096, "freq_dim": 256, "num_heads": 40, "num_layers": 40}
H3: dict[str, int] = {}  # its own
TEXT = {"vocab": 64, "dim_attn": 64, "dim_ffn": 64, "num_heads": 2, "num_layers": 1, "dropout": 0.0}
if given.small:
    SIZES = ((32, 32, 5), (32, 48, 9)) if given.model == "wan" else ((32, 32, 22), (32, 64, 22))
    WAN |= {"dim": 60, "ffn_dim": 64, "text_dim": 64, "freq_dim": 16, "num_heads": 5, "num_layers": 4}
    H3 |= {"hidden_size": 48, "num_attention_heads": 4, "attention_head_dim": 16, "ffn_hidden_size": 64}
    H3 |= {"num_layers": 4, "token_refiner_num_layers": 1, "text_dim": 32, "rope_inv_freq_len": 2}
    H3 |= {"time_embed_dim": 24, "time_embed_hidden_size": 24, "timestep_input_dim": 16}
    H3 |= {"adaln_out_features": 6 * 48 * 3, "final_adaln_out_features": 2 * 48}


def made(cls: Any, **config: Any) -> Any:
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = cls(**config).eval().requires_grad_(False)
        for tensor in model.state_dict().values():  # some are as their memory was
            if tensor.dim() < 2:
                tensor.uniform_(0.5, 1)
    torch.set_default_dtype(torch.float32)
    return model


def tokenizer(text: str, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of one that is loaded."""
    ids = torch.zeros(1, 512, dtype=torch.long)
    ids[0, : len(text)] = torch.tensor([ord(letter) % 64 for letter in text])
    return ids, (ids > 0).long()


def wan() -> tuple[Any, dict[str, Any]]:
    from diffsynth.models.wan_video_dit import WanModel
    from diffsynth.models.wan_video_text_encoder import WanTextEncoder
    from diffsynth.models.wan_video_vae import WanVideoVAE
    from diffsynth.pipelines.wan_video import WanVideoPipeline

    pipe = WanVideoPipeline(device=DEVICE, torch_dtype=torch.bfloat16)
    pipe.tokenizer = tokenizer
    pipe.text_encoder = made(WanTextEncoder, dim=WAN["text_dim"], **TEXT)
    pipe.vae = made(WanVideoVAE)
    pipe.dit = made(WanModel, in_dim=16, out_dim=16, eps=1e-6, patch_size=(1, 2, 2), has_image_input=False, **WAN)
    return pipe, {"prompt": "a street", "negative_prompt": "blur", "tiled": False}


def minimax_h3() -> tuple[Any, dict[str, Any]]:
    from diffsynth.models.minimax_h3_audio_vae import MiniMaxH3AudioVAE
    from diffsynth.models.minimax_h3_dit import MiniMaxH3DiT
    from diffsynth.models.minimax_h3_video_vae import MiniMaxH3VideoVAE
    from diffsynth.pipelines.minimax_h3_audio_video import MiniMaxH3Pipeline

    pipe = MiniMaxH3Pipeline(device=DEVICE, torch_dtype=torch.bfloat16)
    pipe.dit = made(MiniMaxH3DiT, **H3)
    pipe.video_vae, pipe.audio_vae = made(MiniMaxH3VideoVAE), made(MiniMaxH3AudioVAE)
    pipe.output_audio_format_check = lambda audio: audio
    text = torch.randn((512, pipe.dit.condition_proj.in_features), generator=torch.Generator().manual_seed(1))
    return pipe, {"text_embedding": text, "negative_prompt": None}


def pipeline() -> tuple[Any, dict[str, Any]]:
    pipe, arguments = {"wan": wan, "minimax_h3": minimax_h3}[given.model]()
    pipe.vae_output_to_video = lambda video, **_: video
    if given.keep == "host":
        if not hasattr(torch.cpu, "empty_cache"):  # DiffSynth calls it for any device
            torch.cpu.empty_cache = lambda: None
        pipe.dit.to("cpu")
        dtypes = {f"{state}_dtype": torch.bfloat16 for state in ("offload", "onload", "preparing", "computation")}
        places = {"offload_device": "cpu", "onload_device": "cpu"}
        config = {**dtypes, **places, "preparing_device": DEVICE, "computation_device": DEVICE}
        kind = type(pipe.dit)
        layers = ModelPool().fetch_module_map(f"{kind.__module__}.{kind.__qualname__}", config)
        enable_vram_management(pipe.dit, layers, vram_config=config, vram_limit=given.vram_limit)
        pipe.vram_management_enabled = pipe.check_vram_management_state()
    return pipe, arguments


start = time.perf_counter()
pipe, arguments = pipeline()
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
    made_video = pipe(
        **arguments,
        seed=0,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=given.steps,
    )
    video = made_video[0] if isinstance(made_video, tuple) else made_video
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else None
    assert video.isfinite().all()
    digest = hashlib.sha256(video.float().cpu().numpy()).hexdigest()[:12]
    calls.append({"size": [height, width, frames], "seconds": seconds, "frames": digest, "peak_GiB": peak})
    print(json.dumps(calls[-1]), flush=True)
name = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
row = {
    "model": given.model,
    "keep": given.keep,
    "vram_limit_GiB": given.vram_limit,
    "limit_GiB": given.limit,
    "made_s": made_in,
}
print(json.dumps({"gpu": name, "torch": torch.__version__, **row, "calls": calls}))
