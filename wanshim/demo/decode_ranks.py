"""What each process of `wanshim demo decode` does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HEIGHT, WIDTH = 128, 208
SEED = 0


@dataclass(frozen=True)
class Job:
    """The demo's settings, as they travel to the processes."""

    clip: str
    frames: int
    ranks: int
    mode: str
    fast: bool
    video: str
    answer: str
    variables: dict[str, str]  # by which the processes find each other


def work(rank: int, job: Job) -> None:
    """Encode the clip, decode it alone and together; the first rank writes what it saw."""
    from wanshim.core.decoding import parallelize_decode

    device = _device(rank, job.ranks)
    torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.update(job.variables)  # noqa: TID251 - set for this process, not read
    dist.init_process_group(backend, rank=rank, world_size=job.ranks)
    vae = make_vae().to(device)
    with torch.no_grad():
        latent = vae.encode(read_clip(Path(job.clip), job.frames).to(device)).latent_dist.mode()
        alone, reference = _timed(lambda: vae.decode(latent).sample)
        handle = parallelize_decode(vae, mode=job.mode, strict=not job.fast)
        vae.decode(latent)  # connections are made at the first decode
        together, frames = _timed(lambda: vae.decode(latent).sample)
    if rank == 0:
        difference = float((frames - reference).abs().max())
        plan = handle.plan
        assert plan is not None
        limit = {"strict": 0.0, "within tolerance": 1e-4}.get(plan.exactness, float("inf"))
        write_clip(Path(job.video), frames[0])
        result = {"alone": alone, "together": together, "difference": difference, "plan": str(plan)}
        result |= {"kept": difference <= limit, "video": job.video}
        Path(job.answer).write_text(json.dumps(result), encoding="utf-8")
    handle.remove()
    dist.barrier()
    dist.destroy_process_group()


def make_vae() -> Any:
    """A Wan 2.1 VAE of diffusers with every kind of layer and few channels, the same in every process."""
    import logging

    from diffusers import AutoencoderKLWan

    logging.getLogger("diffusers").setLevel(logging.ERROR)
    torch.manual_seed(SEED)
    vae = AutoencoderKLWan(base_dim=16, z_dim=16)
    return vae.eval().requires_grad_(False)


def read_clip(path: Path, frames: int) -> torch.Tensor:
    """The first frames of a clip as [1, 3, T, H, W] in -1..1."""
    import av

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


def _device(rank: int, ranks: int) -> torch.device:
    if torch.cuda.device_count() < ranks:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _timed(decode: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    dist.barrier()
    start = time.perf_counter()
    frames = decode()
    if frames.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, frames
