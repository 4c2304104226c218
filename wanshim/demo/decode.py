"""`wanshim demo decode`: a real clip, encoded by a tiny Wan VAE, decoded by one process and by several."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from wanshim.demo import clip
from wanshim.demo.comparison import Comparison, check_installed
from wanshim.demo.meeting import served_store
from wanshim.errors import WanshimError

if TYPE_CHECKING:
    import torch

HEIGHT, WIDTH = 128, 208
SEED = 0
WITHIN = {"strict": 0.0, "within tolerance": 1e-4}  # largest difference that a plan promises
console = Console()


def run(*, frames: int, ranks: int, mode: str, fast: bool, output: Path, video: Path | None) -> None:
    """A real clip through a tiny Wan VAE, decoded by one process and by several: plan, speed, difference."""
    # On as many GPUs as processes where there are enough, else on the CPU, one thread each.
    clip.check_frames(frames)
    if ranks < 1:
        raise WanshimError(f"--ranks {ranks}", expected="1 or more processes")
    check_installed("torch", "diffusers", "av")
    import torch.multiprocessing as processes

    source = clip.find(video)
    output.mkdir(parents=True, exist_ok=True)
    console.print(f"clip        {source}", highlight=False)
    console.print(f"processes   1 and {ranks}, {'fast' if fast else 'strict'} operators\n", highlight=False)
    with tempfile.TemporaryDirectory(prefix="wanshim-demo-") as folder, served_store() as variables:
        answer = Path(folder, "answer.json")
        target = output / "decoded.mp4"
        processes.spawn(work, (variables, ranks, source, frames, mode, not fast, target, answer), nprocs=ranks)
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    console.print(result["plan"] + "\n", highlight=False)
    table = Comparison("decode", "each process alone, diffusers", result["alone"])
    table.add(f"{ranks} processes, wanshim", result["together"], result["difference"])
    console.print(table)
    console.print(f"\nframes      {target}", highlight=False)
    if result["difference"] > WITHIN.get(result["exactness"], float("inf")):
        raise SystemExit(1)


def work(
    rank: int,
    variables: dict[str, str],
    ranks: int,
    source: Path,
    frames: int,
    mode: str,
    strict: bool,
    target: Path,
    answer: Path,
) -> None:
    """The work of each process: encode the clip, decode it alone and together. The first one writes what it saw.

    Args:
        variables: by which the processes find each other.
        target: for the frames.
        answer: for plan, seconds and difference, as JSON.
    """
    import torch
    import torch.distributed as dist

    from wanshim.core.decoding import parallelize_decode

    device = torch.device("cpu")
    if torch.cuda.device_count() >= ranks:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    os.environ.update(variables)  # noqa: TID251 - set for this process, not read
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=ranks)
    vae = make_vae().to(device)
    with torch.no_grad():
        latent = vae.encode(read_clip(source, frames).to(device)).latent_dist.mode()
        alone, reference = _timed(lambda: vae.decode(latent).sample)
        handle = parallelize_decode(vae, mode=mode, strict=strict)
        vae.decode(latent)  # connections are made at the first decode
        together, decoded = _timed(lambda: vae.decode(latent).sample)
    if rank == 0:
        plan = handle.plan
        assert plan is not None
        write_clip(target, decoded[0])
        difference = float((decoded - reference).abs().max())
        result = {"alone": alone, "together": together, "difference": difference}
        answer.write_text(json.dumps({**result, "plan": str(plan), "exactness": plan.exactness}), encoding="utf-8")
    handle.remove()
    dist.barrier()
    dist.destroy_process_group()


def make_vae() -> Any:
    """A Wan 2.1 VAE of diffusers with every kind of layer and few channels, the same in every process."""
    import logging

    import torch
    from diffusers import AutoencoderKLWan

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    torch.manual_seed(SEED)
    vae = AutoencoderKLWan(base_dim=16, z_dim=16)
    return vae.eval().requires_grad_(False)


def read_clip(path: Path, frames: int) -> torch.Tensor:
    """The first frames of a clip as [1, 3, T, H, W] in -1..1."""
    import av
    import torch

    images = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            images.append(torch.from_numpy(frame.reformat(WIDTH, HEIGHT, "rgb24").to_ndarray()))
            if len(images) == frames:
                break
    video = torch.stack(images).float() / 127.5 - 1
    return video.permute(3, 0, 1, 2).unsqueeze(0)


def write_clip(path: Path, frames: torch.Tensor) -> None:
    """Write frames [3, T, H, W] in -1..1 as mp4."""
    import av

    pictures = ((frames.float() + 1) * 127.5).round().byte().permute(1, 2, 3, 0).cpu().numpy()
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=16)
        stream.width, stream.height, stream.pix_fmt = pictures.shape[2], pictures.shape[1], "yuv420p"
        for picture in pictures:
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _timed(decode: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    import torch

    torch.distributed.barrier()
    start = time.perf_counter()
    frames = decode()
    if frames.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, frames
