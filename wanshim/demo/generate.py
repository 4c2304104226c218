"""`wanshim demo generate`: a tiny random Wan pipeline of diffusers, denoised by one process and by several."""

from __future__ import annotations

import logging
import time
from typing import Any

from rich.console import Console

from wanshim.demo.comparison import Comparison, check_installed
from wanshim.errors import WanshimError

ROUNDING = 1e-5  # largest difference of a pixel in [0, 1], float32
_SIZE = {"height": 128, "width": 128, "num_frames": 17}
console = Console()


def run(*, gpus: int, steps: int) -> None:
    """A tiny Wan pipeline, denoised by one process, by two and by several: plans, speed, difference."""
    if gpus < 2 or steps < 1:
        raise WanshimError(f"--gpus {gpus} --steps {steps}", expected="two or more processes, one or more steps")
    check_installed("torch", "diffusers")
    import torch

    import wanshim

    on_gpus = torch.cuda.device_count() >= gpus
    threads = torch.get_num_threads()
    if not on_gpus:
        torch.set_num_threads(1)  # each process has one
    try:
        console.print("A tiny Wan pipeline with random weights; each further process starts once.\n")
        pipe = _pipeline().to("cuda:0" if on_gpus else "cpu")
        alone, seconds = _generate(pipe, steps)
        table = Comparison("generate", "one process, diffusers", seconds)
        kept = True
        for count in dict.fromkeys((2, gpus)):
            devices = [f"cuda:{index}" if on_gpus else "cpu" for index in range(count)]
            handle = wanshim.parallelize_pipeline(pipe, devices)
            try:
                frames, seconds = _generate(pipe, steps)
                plan = handle.plan
            finally:
                handle.remove()
            assert plan is not None
            console.print(f"{plan}\n", highlight=False, markup=False, soft_wrap=True)
            difference = (frames - alone).abs().max().item()
            kept &= plan.gpus > 1 and difference <= (ROUNDING if plan.sequence > 1 else 0.0)
            table.add(f"{count} processes, wanshim", seconds, difference)
        console.print(table)
    finally:
        torch.set_num_threads(threads)
    if not kept:  # the frames of two processes are equal bit for bit, those of more within rounding
        raise SystemExit(1)


def _pipeline() -> Any:
    """A Wan text-to-video pipeline of 4 blocks and 4 heads; the prompt is given as embeddings."""
    import diffusers
    import torch

    torch.manual_seed(0)
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        text_dim=16,
        ffn_dim=256,
        num_layers=4,
        rope_max_seq_len=64,
    )
    vae = diffusers.AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _generate(pipe: Any, steps: int) -> tuple[Any, float]:
    """Frames (1, f, 3, h, w) in [0, 1], on the host, and the seconds of a call after the first."""
    import torch

    def call(steps: int) -> Any:
        seeded = torch.Generator().manual_seed(1)
        prompt, negative = (torch.randn(1, 8, 16, generator=seeded).to(pipe.device) for _ in range(2))
        given = {"prompt_embeds": prompt, "negative_prompt_embeds": negative, **_SIZE, "num_inference_steps": steps}
        return pipe(**given, generator=torch.Generator().manual_seed(2), output_type="pt").frames.cpu()

    call(1)
    begun = time.perf_counter()
    frames = call(steps)
    return frames, time.perf_counter() - begun
