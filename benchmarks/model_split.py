"""One LoRA micro-batch of the 14B Wan DiT on one GPU and split over several, in one run.

    python benchmarks/model_split.py --devices cuda:0,cuda:1 --json benchmarks/results/model_split.json

Weights are random, shapes are those of Wan2.1-T2V-14B (40 blocks, dim 5120), 480x832x49 (20,280 tokens),
bf16, PEFT LoRA r=32 on q,k,v,o,ffn.0,ffn.2, gradient checkpointing, DiffSynth's own `model_fn_wan_video`.
Prints seconds a micro-batch (median after a warm-up), the ratio to one GPU, and each GPU's peak. A last,
deterministic micro-batch of both arms compares loss and every LoRA gradient bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import checkout
import torch
from diffsynth.models.wan_video_dit import WanModel
from diffsynth.pipelines.wan_video import model_fn_wan_video
from peft import LoraConfig, inject_adapter_in_model

from wanshim.core.model_split import split_model

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
TARGETS = ["q", "k", "v", "o", "ffn.0", "ffn.2"]


def build(args: argparse.Namespace, device: str) -> WanModel:
    """The DiT with LoRA, random, on one device."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = WanModel(
            dim=args.dim, in_dim=16, ffn_dim=args.ffn_dim, out_dim=16, text_dim=args.text_dim, freq_dim=256,
            eps=1e-6, patch_size=(1, 2, 2), num_heads=args.heads, num_layers=args.layers, has_image_input=False,
        )  # fmt: skip
    model = model.to(torch.bfloat16).to_empty(device=device)
    with torch.device("cpu"):
        model.freqs = WanModel(
            dim=args.dim, in_dim=1, ffn_dim=1, out_dim=1, text_dim=1, freq_dim=2, eps=1e-6, patch_size=(1, 2, 2),
            num_heads=args.heads, num_layers=0, has_image_input=False,
        ).freqs  # fmt: skip
    return with_lora(model, args.rank, TARGETS, device)


def with_lora(model: Any, rank: int, targets: list[str], device: str) -> Any:
    """A frozen model with LoRA, all of it drawn from one seed."""
    model.requires_grad_(False)
    model = inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), model)
    generator = torch.Generator(device=device).manual_seed(1)
    for name, parameter in model.named_parameters():
        flat = parameter.dim() < 2
        spread = 0.02 if flat else parameter[0].numel() ** -0.5
        with torch.no_grad():
            parameter.normal_(0.0, spread, generator=generator)
            if "norm" in name and flat:
                parameter.add_(1.0)
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model.train()


def micro_batch(model: WanModel, args: argparse.Namespace, home: str, seed: int) -> torch.Tensor:
    """Forward and backward of one sample; gradients accumulate as in training."""
    generator = torch.Generator(device=home).manual_seed(seed)
    frames = (args.frames - 1) // 4 + 1
    shape = (1, 16, frames, args.height // 8, args.width // 8)
    like = {"device": home, "dtype": torch.bfloat16, "generator": generator}
    latents, target = torch.randn(shape, **like), torch.randn(shape, **like)
    context = torch.randn((1, 512, args.text_dim), **like)
    timestep = torch.tensor([500.0], device=home, dtype=torch.bfloat16)
    output = model_fn_wan_video(
        model, latents=latents, timestep=timestep, context=context, use_gradient_checkpointing=True
    )
    loss = torch.nn.functional.mse_loss(output.float(), target.float())
    loss.backward()
    return loss.detach()


def synchronize(devices: list[str]) -> None:
    for device in set(devices):
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)


def measure(model: WanModel, args: argparse.Namespace, devices: list[str]) -> dict[str, Any]:
    cards = sorted({d for d in devices if d.startswith("cuda")})
    for card in cards:
        torch.cuda.reset_peak_memory_stats(card)
    seconds = []
    for i in range(args.repeats + 1):
        model.zero_grad()
        synchronize(devices)
        start = time.perf_counter()
        micro_batch(model, args, devices[0], i)
        synchronize(devices)
        seconds.append(time.perf_counter() - start)
    peaks = {card: round(torch.cuda.max_memory_allocated(card) / 2**30, 2) for card in cards}
    return {"seconds": seconds[1:], "median": statistics.median(seconds[1:]), "peak_GiB": peaks}


def exact(model: WanModel, args: argparse.Namespace, home: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and LoRA gradients of one micro-batch with deterministic kernels, on the host."""
    torch.use_deterministic_algorithms(True)
    try:
        model.zero_grad()
        loss = micro_batch(model, args, home, 99)
    finally:
        torch.use_deterministic_algorithms(False)
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients


def add_sizes(parser: argparse.ArgumentParser, **others: int) -> None:
    """The options of a training step of Wan 2.1 14B, and further whole numbers by name."""
    for name, value in {
        "layers": 40, "dim": 5120, "ffn-dim": 13824, "heads": 40, "text-dim": 4096, "rank": 32,
        "height": 480, "width": 832, "frames": 49, "repeats": 3, **others,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    add_sizes(parser)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    devices = args.devices.split(",")

    model = build(args, devices[0])
    single = measure(model, args, [devices[0]])
    loss, gradients = exact(model, args, devices[0])
    arms = {"one GPU": single}
    handle = split_model(model, devices, exits=("head",))
    gc.collect()
    if devices[0].startswith("cuda"):
        torch.cuda.empty_cache()
    print(handle.plan)
    arms[f"split over {len(devices)}"] = split = measure(model, args, devices)
    split_loss, split_gradients = exact(model, args, devices[0])
    equal = sum(torch.equal(gradients[name], split_gradients[name]) for name in gradients)

    ratio = split["median"] / single["median"]
    for title, arm in arms.items():
        times = ", ".join(f"{s:.3f}" for s in arm["seconds"])
        print(f"{title:14} {arm['median']:.3f} s (of {times}), peak GiB {arm['peak_GiB']}")
    print(f"split / one GPU: {ratio:.4f}")
    print(f"loss {loss!r} and {split_loss!r}; {equal} of {len(gradients)} LoRA gradients equal bit for bit")
    if args.json:
        args.json.write_text(
            json.dumps(_record(args, arms, ratio, loss == split_loss, equal, len(gradients)), indent=1)
        )


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What every result says of itself."""
    return {
        "benchmark": Path(sys.argv[0]).stem,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        **checkout.state(),
        "arguments": {name: str(value) for name, value in vars(args).items() if name != "json"},
    }


def _record(args: argparse.Namespace, arms: dict[str, Any], ratio: float, loss: bool, equal: int, all_: int) -> Any:
    return environment(args) | {
        "arms": arms,
        "ratio_split_to_one_gpu": ratio,
        "loss_equal": loss,
        "gradients_equal": f"{equal} of {all_}",
    }


if __name__ == "__main__":
    main()
