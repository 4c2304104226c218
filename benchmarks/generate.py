"""Guidance over GPUs at full size: seconds of a call alone and over two GPUs, the start of the worker, memory.

    python benchmarks/generate.py --gpus 2                        Wan 2.1 14B, random weights, 480x832x81
    python benchmarks/generate.py --devices cuda:0,cuda:0         two processes on one GPU: bits, cost of sharing
    python benchmarks/generate.py --gpus 2 --height 720 --width 1280 --steps 50

Writes one JSON object. Weights are random: what is measured depends on shapes alone.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

import wanshim

SIZES = {
    "14B": (40, 40, 13824),
    "1.3B": (12, 30, 8960),
    "tiny": (2, 2, 64),
}  # heads, blocks, width of the feed-forward layers


def pipeline(size: str, device: str) -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    heads, blocks, ffn = SIZES[size]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        torch.manual_seed(0)
        transformer = WanTransformer3DModel(num_attention_heads=heads, num_layers=blocks, ffn_dim=ffn).eval()
        vae = AutoencoderKLWan().eval()
    torch.set_default_dtype(before)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=5.0
    )
    pipe = WanPipeline(tokenizer=None, text_encoder=None, transformer=transformer, vae=vae, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe: Any, options: argparse.Namespace, steps: int) -> tuple[torch.Tensor, float]:
    seeded = torch.Generator().manual_seed(1)
    text = [torch.randn(1, 512, 4096, generator=seeded).to(pipe.device, torch.bfloat16) for _ in range(2)]
    wait()
    begun = time.perf_counter()
    frames = pipe(
        prompt_embeds=text[0],
        negative_prompt_embeds=text[1],
        height=options.height,
        width=options.width,
        num_frames=options.frames,
        num_inference_steps=steps,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(2),
        output_type=options.output,
    ).frames
    wait()
    return frames.cpu(), time.perf_counter() - begun


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="14B")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--devices", default="", help="in place of --gpus, such as cuda:0,cuda:0")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", choices=("latent", "pt"), default="latent", help="pt decodes")
    options = parser.parse_args()
    pipe = pipeline(options.model, "cuda:0")
    call(pipe, options, 1)
    alone, seconds_alone = call(pipe, options, options.steps)
    handle = wanshim.parallelize_pipeline(pipe, options.devices.split(",") if options.devices else options.gpus)
    _, first = call(pipe, options, 1)
    torch.cuda.reset_peak_memory_stats()
    shared, seconds_shared = call(pipe, options, options.steps)
    _, one_step = call(pipe, options, 1)
    weights = sum(p.numel() * p.element_size() for p in pipe.transformer.parameters())
    print(
        json.dumps(
            {
                "options": vars(options),
                "torch": torch.__version__,
                "gpu": torch.cuda.get_device_name(),
                "plan": str(handle.plan),
                "equal": torch.equal(alone, shared),
                "seconds_alone": seconds_alone,
                "seconds_shared": seconds_shared,
                "gain": seconds_alone / seconds_shared,
                "start_and_weights_s": first - one_step,
                "weights_GiB": weights / 2**30,
                "predicted_GiB": {device: peak / 2**30 for device, peak in handle.plan.peaks.items()},
                "peak_GiB_of_process_0": torch.cuda.max_memory_allocated() / 2**30,
            },
            indent=1,
        )
    )
    handle.remove()


if __name__ == "__main__":
    main()
