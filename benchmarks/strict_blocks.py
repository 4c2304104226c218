"""One forward of a Wan or Qwen-Image transformer with `strict_blocks`, beside the framework alone in the same process.

    python benchmarks/strict_blocks.py --json benchmarks/results/strict_blocks_1xH200.json
    python benchmarks/strict_blocks.py --frameworks qwen_image --model 20B --json ...

Weights are random. Seconds are the least of several calls; `first_s` is the first call with wanshim, which compiles
kernels and compares. A call computes both ways where it is due to compare, so `calls` has more than the least.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout
import torch

import wanshim
from wanshim.core.shared.kernel_compiler import COMPILER

SIZES = {
    "480x832x81": (1, 21, 60, 104),
    "720x1280x81": (1, 21, 90, 160),
    "272x368x9, batch 2": (2, 3, 34, 46),
    "256x256x17, a time for each token": (1, 5, 32, 32),
}  # batch, and frames, height and width of latents
PICTURES = {"1024x1024": (1, 64, 64), "1664x928": (1, 58, 104)}  # batch, and rows and columns of tokens
MODELS = {
    "20B": (3072, 24, 60, 12288),  # Qwen-Image
    "14B": (5120, 40, 40, 13824),
    "1.3B": (1536, 12, 30, 8960),
    "small": (1536, 12, 2, 4096),
    "tiny": (96, 4, 2, 64),
}
REPEATS = {"720x1280x81": 2}
Forward = Callable[[], torch.Tensor]


def diffusers_model(model: str, dtype: torch.dtype, device: torch.device) -> Callable[[tuple[int, ...], bool], Forward]:
    from diffusers import WanTransformer3DModel

    dim, heads, blocks, ffn = MODELS[model]
    config = {"num_attention_heads": heads, "attention_head_dim": dim // heads, "num_layers": blocks, "ffn_dim": ffn}
    made = _made(lambda: WanTransformer3DModel(**config), dtype, device)

    def forward(size: tuple[int, ...], per_token: bool) -> Forward:
        given = _inputs(size, dtype, device)
        times = torch.rand(size[0], size[1] * size[2] * size[3] // 4, generator=_seed()).to(device) * 1000
        given["timestep"] = times if per_token else torch.full((size[0],), 500.0, device=device)
        given["hidden_states"], given["encoder_hidden_states"] = given.pop("latents"), given.pop("context")
        return lambda: made(**given, return_dict=False)[0]

    return forward


def diffsynth_model(model: str, dtype: torch.dtype, device: torch.device) -> Callable[[tuple[int, ...], bool], Forward]:
    from diffsynth.models import wan_video_dit
    from diffsynth.pipelines.wan_video import model_fn_wan_video

    dim, heads, blocks, ffn = MODELS[model]
    config: dict[str, Any] = {"dim": dim, "num_heads": heads, "num_layers": blocks, "ffn_dim": ffn, "eps": 1e-6}
    config |= {"in_dim": 16, "out_dim": 16, "text_dim": 4096, "freq_dim": 256, "patch_size": (1, 2, 2)}
    made = _made(lambda: wan_video_dit.WanModel(**config, has_image_input=False), dtype, device)
    made.freqs = wan_video_dit.precompute_freqs_cis_3d(dim // heads)

    def forward(size: tuple[int, ...], per_token: bool) -> Forward:
        given = _inputs(size, dtype, device) | {"timestep": torch.full((1,), 500.0, device=device, dtype=dtype)}
        return lambda: model_fn_wan_video(made, **given)

    return forward


def qwen_model(model: str, dtype: torch.dtype, device: torch.device) -> Callable[[tuple[int, ...], bool], Forward]:
    from diffusers import QwenImageTransformer2DModel

    dim, heads, blocks, _ = MODELS[model]
    head = dim // heads
    side = head * 7 // 32 * 2  # channels that a row turns, and a column
    config = {"num_attention_heads": heads, "attention_head_dim": head, "num_layers": blocks}
    config["axes_dims_rope"] = (head - 2 * side, side, side)
    made = _made(lambda: QwenImageTransformer2DModel(**config), dtype, device)

    def forward(size: tuple[int, ...], _: bool) -> Forward:
        batch, *sizes = size
        given = {
            "hidden_states": torch.randn(batch, sizes[0] * sizes[1], 64, generator=_seed()).to(device, dtype),
            "encoder_hidden_states": torch.randn(batch, 512, 3584, generator=_seed()).to(device, dtype),
            "timestep": torch.full((batch,), 0.5, device=device),
            "img_shapes": [[(1, *sizes)]] * batch,
        }
        return lambda: made(**given, return_dict=False)[0]

    return forward


FRAMEWORKS = {"diffusers": diffusers_model, "diffsynth": diffsynth_model, "qwen_image": qwen_model}


def feature_of(framework: str) -> str:
    return "diffsynth.strict_blocks" if framework == "diffsynth" else "diffusers.strict_blocks"


def _made(make: Callable[[], Any], dtype: torch.dtype, device: torch.device) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            torch.manual_seed(0)
            return make().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def _seed() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _inputs(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    batch, *sizes = size
    latents = torch.randn(batch, 16, *sizes, generator=_seed())
    context = torch.randn(batch, 512, 4096, generator=_seed())
    return {"latents": latents.to(device, dtype), "context": context.to(device, dtype)}


@torch.no_grad()
def timed(forward: Forward, repeats: int) -> tuple[list[float], torch.Tensor, float]:
    """Seconds of each call, the last result, and the peak in GiB of all but the first."""
    seconds, result = [], torch.empty(0)
    for number in range(repeats + 1):
        _wait()
        if number == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = forward()
        _wait()
        seconds.append(time.perf_counter() - start)
        COMPILER.wait()  # beside the first
    return seconds, result, torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", default="diffusers,diffsynth", help=f"of {', '.join(FRAMEWORKS)}")
    parser.add_argument("--model", choices=MODELS, default="14B")
    parser.add_argument("--sizes", type=int, nargs="*", help="numbers of the sizes; default: all")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    about = {"gpu": gpu, "torch": torch.__version__, **checkout.state(), "model": args.model, "dtype": args.dtype}
    device, rows = torch.device("cuda" if gpu != "CPU" else "cpu"), []
    for framework in args.frameworks.split(","):
        forward = FRAMEWORKS[framework](args.model, getattr(torch, args.dtype), device)
        for number, (name, size) in enumerate((PICTURES if framework == "qwen_image" else SIZES).items()):
            per_token = "each token" in name
            if (args.sizes and number not in args.sizes) or (per_token and framework == "diffsynth"):
                continue
            call, repeats = forward(size, per_token), REPEATS.get(name, args.repeats)
            alone, expected, own_peak = timed(call, min(repeats, 3))
            wanshim.activate(feature_of(framework))
            ours, found, peak = timed(call, repeats)
            notes = [note for row in wanshim.report().rows for note in row.notes if row.calls]
            wanshim.deactivate()
            rows.append({
                "framework": framework, "size": name, "alone_s": min(alone), "strict_s": min(ours[1:]),
                "ratio": min(alone) / min(ours[1:]), "first_s": ours[0], "calls": ours, "alone_calls": alone,
                "equal": torch.equal(found, expected), "peak_GiB": [own_peak, peak], "notes": notes,
            })  # fmt: skip
            print(
                json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in rows[-1].items()}), flush=True
            )
            if args.json:  # after each row: a time limit may end the run
                args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        del forward, call
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
