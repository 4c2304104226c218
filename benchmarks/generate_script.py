"""A user's script that knows nothing of wanshim: a Wan transformer with random weights, three calls of two sizes, or
one of the first size within each of several limits.

    python benchmarks/generate_script.py none 3
    wanshim generate --gpus 2 -- python benchmarks/generate_script.py none 3
    wanshim generate --gpus 1 --fast -- python benchmarks/generate_script.py none 3
    wanshim generate --gpus 1 -- python benchmarks/generate_script.py model 3 --limit 8
    wanshim generate --gpus 1 -- python benchmarks/generate_script.py group 3 --limit 8 --pair
    wanshim generate --gpus 1 -- python benchmarks/generate_script.py model 2 --limit 8 8 14 16 24
    wanshim generate --gpus 1 -- python benchmarks/generate_script.py move 3 --limit 16
    wanshim generate --gpus 1 -- python benchmarks/generate_script.py model 2 --limit 14 --size 720x1280x81
    wanshim generate --gpus 2 -- python benchmarks/generate_script.py model 2 --limit 16 16 --others 16
    wanshim generate --gpus 1 -- python benchmarks/generate_script.py none 20 --model 5B

The first argument says how it offloads the transformer: none, model, group, which is diffusers' with a stream, or
move, which calls the pipeline's `to("cuda")` within the first limit; the second how many steps. `--model` is 14B,
1.3B, or 5B, which has the VAE of Wan 2.2. `--pair` has both experts of Wan 2.2, `--compile` compiles their blocks,
`--limit` holds torch's allocator to so many GiB once the models are made, `--others` leaves so many free on each
other GPU, `--size` is that of one call alone, and `--guidance 1` generates without guidance, as a distilled model
does. It prints, of each call, seconds, the digest of its frames and the peak in GiB of its own GPU; what is taken of
the others in the end, with the contexts of CUDA; and the host memory of its process, shared and locked.
"""

import argparse
import hashlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

SIZES = {
    "14B": ((480, 832, 81), (480, 832, 81), (272, 480, 33)),
    "1.3B": ((480, 832, 81), (480, 832, 81), (272, 480, 33)),
    "5B": ((704, 1280, 121), (704, 1280, 121), (352, 640, 41)),
}
TRANSFORMERS = {
    "14B": {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824},
    "1.3B": {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
    "5B": {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
}
VAES = {
    "5B": {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    }
}


def made(cls: Any, seed: int, **config: Any) -> Any:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        torch.manual_seed(seed)
        model = cls(**config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def transformer(size: str, offload: str, seed: int) -> WanTransformer3DModel:
    model = made(WanTransformer3DModel, seed, **TRANSFORMERS[size])
    if offload != "none":
        model.to("cpu")
        torch.cuda.empty_cache()
    if offload == "group":
        places = torch.device("cuda"), torch.device("cpu")
        model.enable_group_offload(*places, "block_level", num_blocks_per_group=1, use_stream=True)
    return model


def pipeline(size: str, offload: str, pair: bool) -> WanPipeline:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=5.0
    )
    vae = made(AutoencoderKLWan, 0, **VAES.get(size, {}))
    parts = {"transformer": transformer(size, offload, 0), "vae": vae, "scheduler": scheduler}
    if size == "5B":
        parts["expand_timesteps"] = True
    if pair:
        parts |= {"transformer_2": transformer(size, offload, 1), "boundary_ratio": 0.875}
    pipe = WanPipeline(tokenizer=None, text_encoder=None, **parts)
    pipe.set_progress_bar_config(disable=True)
    if offload == "model":
        pipe.enable_model_cpu_offload()
    return pipe


def host() -> dict[str, float]:
    """GiB of this process in host memory."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    names = "VmRSS", "VmHWM", "RssAnon", "RssShmem", "VmPin"
    return {name: round(int(lines[name].split()[0]) / 2**20, 2) for name in names}


parser = argparse.ArgumentParser()
parser.add_argument("offload", choices=("none", "model", "group", "move"))
parser.add_argument("steps", type=int)
parser.add_argument("--model", choices=TRANSFORMERS, default="14B")
parser.add_argument("--pair", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--limit", type=float, nargs="*", default=[])
parser.add_argument("--others", type=float)
parser.add_argument("--guidance", type=float, default=5.0)
parser.add_argument("--size", type=lambda text: tuple(map(int, text.split("x"))))
given = parser.parse_args()
start = time.perf_counter()
whole = torch.cuda.get_device_properties(0).total_memory
pipe = pipeline(given.model, given.offload, given.pair)
if given.offload == "move":
    torch.cuda.set_per_process_memory_fraction(given.limit[0] * 2**30 / whole)
    pipe.to("cuda")
if given.compile:
    for name in ("transformer", "transformer_2"):
        if getattr(pipe, name) is not None:
            getattr(pipe, name).compile_repeated_blocks(fullgraph=True)
filled = {}
for other in range(1, torch.cuda.device_count() if given.others is not None else 1):
    free = torch.cuda.mem_get_info(other)[0]
    filled[other] = torch.empty(int(free - given.others * 2**30), dtype=torch.uint8, device=f"cuda:{other}")
made_in = time.perf_counter() - start
seeded = torch.Generator().manual_seed(1)
prompt, negative = (torch.randn(1, 512, 4096, generator=seeded).to("cuda", torch.bfloat16) for _ in range(2))
sizes = SIZES[given.model] if given.size is None else (given.size,)
limits = given.limit or [None]
calls = []
for limit, (height, width, frames) in itertools.product(limits, sizes if len(limits) == 1 else sizes[:1]):
    if limit is not None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit * 2**30 / whole)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    video = pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=negative,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=given.steps,
        guidance_scale=given.guidance,
        generator=torch.Generator().manual_seed(2),
        output_type="pt",
    ).frames
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30
    digest = hashlib.sha256(video.float().cpu().numpy()).hexdigest()[:12]
    call = {"size": [height, width, frames], "limit_GiB": limit, "seconds": seconds, "frames": digest, "peak_GiB": peak}
    calls.append(call)
    print(json.dumps(call), flush=True)
taken = [given.others - torch.cuda.mem_get_info(other)[0] / 2**30 for other in filled]
row = {
    "model": given.model,
    "offload": given.offload,
    "pair": given.pair,
    "compile": given.compile,
    "made_s": made_in,
    "guidance": given.guidance,
    "others_GiB": given.others,
    "taken_GiB": taken,
    "calls": calls,
}
print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **row, "host_GiB": host()}))
