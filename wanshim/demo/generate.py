"""`wanshim demo generate`: a tiny random Wan pipeline of diffusers, denoised by one process and by several."""

from __future__ import annotations

import importlib.util
import logging
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from wanshim.errors import WanshimError

ROUNDING = 1e-5  # largest difference of a pixel in [0, 1], float32
_SIZE = {"height": 128, "width": 128, "num_frames": 17}


def run(*, gpus: int = 4, steps: int = 4, console: Console | None = None) -> bool:
    """Generate in one process, in two and in `gpus`; print the plans, times and differences.

    Args:
        gpus: the largest number of processes; on as many GPUs where there are enough, else on the CPU, one thread each.
        steps: denoising steps, each of two forwards.

    Returns:
        whether the frames of two are equal bit for bit, and those of more within rounding.

    Raises:
        WanshimError: fewer than two processes or one step, or diffusers is missing.
    """
    if gpus < 2 or steps < 1:
        raise WanshimError(f"--gpus {gpus} --steps {steps}", expected="two or more processes, one or more steps")
    if importlib.util.find_spec("diffusers") is None:
        raise WanshimError("diffusers is not installed", hint="pip install 'wanshim[demo]'")
    import torch

    import wanshim

    console = console or Console()
    on_gpus = torch.cuda.device_count() >= gpus
    threads = torch.get_num_threads()
    if not on_gpus:
        torch.set_num_threads(1)
    try:
        console.print("A tiny Wan pipeline with random weights; each further process starts once.\n")
        pipe = _pipeline().to("cuda:0" if on_gpus else "cpu")
        _generate(pipe, 1)
        begun = time.perf_counter()
        alone = _generate(pipe, steps)
        seconds = time.perf_counter() - begun
        table = Table("generate", "seconds", "times as fast", "largest difference")
        table.add_row("one process, diffusers", f"{seconds:.2f}", "", "")
        kept = True
        for count in dict.fromkeys((2, gpus)):
            devices = [f"cuda:{index}" if on_gpus else "cpu" for index in range(count)]
            handle = wanshim.parallelize_pipeline(pipe, devices)
            try:
                _generate(pipe, 1)
                begun = time.perf_counter()
                frames = _generate(pipe, steps)
                together = time.perf_counter() - begun
                plan = handle.plan
            finally:
                handle.remove()
            assert plan is not None
            console.print(f"{plan}\n", highlight=False, markup=False, soft_wrap=True)
            difference = (frames - alone).abs().max().item()
            kept &= plan.gpus > 1 and difference <= (ROUNDING if plan.sequence > 1 else 0.0)
            shown = "0, bit for bit" if difference == 0 else f"{difference:.1e}"
            table.add_row(f"{count} processes, wanshim", f"{together:.2f}", f"{seconds / together:.2f}", shown)
        console.print(table)
    finally:
        torch.set_num_threads(threads)
    return kept


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


def _generate(pipe: Any, steps: int) -> Any:
    """Frames (1, f, 3, h, w) in [0, 1], on the host."""
    import torch

    seeded = torch.Generator().manual_seed(1)
    prompt, negative = (torch.randn(1, 8, 16, generator=seeded).to(pipe.device) for _ in range(2))
    given = {"prompt_embeds": prompt, "negative_prompt_embeds": negative, "generator": torch.Generator().manual_seed(2)}
    return pipe(**given, **_SIZE, num_inference_steps=steps, output_type="pt").frames.cpu()
