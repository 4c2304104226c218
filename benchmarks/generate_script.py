"""A user's script that knows nothing of wanshim: the 14B Wan transformer with random weights, three calls of two sizes.

    python benchmarks/generate_script.py none 3
    wanshim generate --gpus 2 -- python benchmarks/generate_script.py none 3

The first argument says how it offloads the transformer: none, model, or group, which is diffusers' with a stream; the
second how many steps. It prints, of each call, seconds, the digest of its frames and the peak in GiB of its own GPU.
"""

import hashlib
import json
import sys
import time
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

SIZES = ((480, 832, 81), (480, 832, 81), (272, 480, 33))


def made(cls: Any, **config: Any) -> Any:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = cls(**config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def pipeline(offload: str) -> WanPipeline:
    transformer = made(WanTransformer3DModel, num_attention_heads=40, num_layers=40, ffn_dim=13824)
    if offload != "none":
        transformer.to("cpu")
        torch.cuda.empty_cache()
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=5.0
    )
    parts = {"transformer": transformer, "vae": made(AutoencoderKLWan), "scheduler": scheduler}
    pipe = WanPipeline(tokenizer=None, text_encoder=None, **parts)
    pipe.set_progress_bar_config(disable=True)
    if offload == "group":
        places = torch.device("cuda"), torch.device("cpu")
        transformer.enable_group_offload(*places, "block_level", num_blocks_per_group=1, use_stream=True)
    elif offload == "model":
        pipe.enable_model_cpu_offload()
    return pipe


offload, steps = sys.argv[1], int(sys.argv[2])
pipe = pipeline(offload)
seeded = torch.Generator().manual_seed(1)
prompt, negative = (torch.randn(1, 512, 4096, generator=seeded).to("cuda", torch.bfloat16) for _ in range(2))
calls = []
for height, width, frames in SIZES:
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    video = pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=negative,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=steps,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(2),
        output_type="pt",
    ).frames
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30
    digest = hashlib.sha256(video.float().cpu().numpy()).hexdigest()[:12]
    calls.append({"size": [height, width, frames], "seconds": seconds, "frames": digest, "peak_GiB": peak})
print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "offload": offload, "calls": calls}))
