"""Wan and Qwen-Image VAE encode on 1 to N GPUs, beside diffusers' own on one.

    python benchmarks/vae_encode.py --ranks 1,2,4 --out benchmarks/results/vae_encode.json

As `vae_decode.py`, whose protocol and options it has: random weights, the real shapes (704x1280, 81 frames for 2.1 and
121 for 2.2; one 2048x2048 image), the slowest rank, the median of the repeats. The whole posterior (mean and logarithm
of the variance) is compared with that of diffusers untiled. `--small` tries it out without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from vae_decode import Bench, Row, main

from wanshim.core.decoding import parallelize_encode

VIDEOS = {"2.1": (1, 3, 81, 704, 1280), "2.2": (1, 3, 121, 704, 1280), "qwen-image": (1, 3, 1, 2048, 2048)}
SMALL = {"2.1": (1, 3, 9, 64, 96), "2.2": (1, 3, 9, 64, 96), "qwen-image": (1, 3, 1, 64, 96)}

ARMS = (
    "wanshim strict",
    "wanshim fast",
    "wanshim temporal strict",
    "wanshim temporal",
    "wanshim spatial strict",
    "wanshim spatial",
)  # of a decode's


class EncodeBench(Bench):
    title = "Wan and Qwen-Image VAE encode"
    parallelize = staticmethod(parallelize_encode)

    @staticmethod
    def call(vae: Any, given: torch.Tensor) -> Any:
        return vae.encode(given).latent_dist.parameters

    def own_arms(self, ranks: int, image: bool) -> dict[str, dict[str, Any]]:
        return {name: options for name, options in super().own_arms(ranks, image).items() if name in ARMS}

    def make(self, layout: str) -> tuple[Any, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = SMALL[layout] if self.args.small else VIDEOS[layout]
        video = torch.rand(shape, generator=generator).mul_(2).sub_(1)
        return self.make_vae(layout), video.to(self.device, self.dtype)

    def compare(self, row: Row, out: torch.Tensor) -> None:
        super().compare(row, out)
        row.psnr = None  # a latent is no picture


if __name__ == "__main__":
    main(EncodeBench)
