"""Two processes on one GPU that stream the 14B Wan transformer from one copy in host memory: what each of them holds.

    python benchmarks/shared_host_copy.py --json benchmarks/results/shared_host_copy_1xH200.json

Weights are random; the pipeline has `enable_model_cpu_offload()`. Calls are computed by one process, and by two that
share guidance; `--free` GiB of the GPU are left to them, so that both stream. Of each process: its resident host
memory, and its proportional share of it, in which a page that two processes map counts half for each. `pinned_GiB` are
pages that drivers have locked on the whole machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import checkout
import psutil
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

import wanshim

SIZES = {"14B": (40, 40, 13824, 480, 832, 81), "tiny": (2, 4, 64, 32, 32, 5)}  # heads, blocks, ffn, and the video


def pipeline(model: str, device: str) -> WanPipeline:
    heads, blocks, ffn, *_ = SIZES[model]
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    with torch.device(device):
        transformer = WanTransformer3DModel(num_attention_heads=heads, num_layers=blocks, ffn_dim=ffn).eval()
        vae = AutoencoderKLWan().eval()
    torch.set_default_dtype(torch.float32)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, transformer=transformer.to("cpu"), vae=vae, scheduler=scheduler
    )
    pipe.set_progress_bar_config(disable=True)
    if device == "cuda":
        pipe.enable_model_cpu_offload()
    return pipe


def called(pipe: WanPipeline, model: str, device: str) -> dict[str, Any]:
    *_, height, width, frames = SIZES[model]
    seeded = torch.Generator().manual_seed(1)
    prompt, negative = (torch.randn(1, 512, 4096, generator=seeded).to(device, torch.bfloat16) for _ in range(2))
    start = time.perf_counter()
    video = pipe(
        prompt_embeds=prompt,
        negative_prompt_embeds=negative,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(2),
        output_type="pt",
    ).frames
    digest = hashlib.sha256(video.float().cpu().numpy()).hexdigest()[:12]
    return {"seconds": round(time.perf_counter() - start, 2), "frames": digest}


def host(process: int) -> dict[str, float]:
    """GiB of a process in host memory."""
    lines = (line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:])
    found = {words[0].rstrip(":"): int(words[1]) / 2**20 for words in lines}
    return {name: round(found[name], 2) for name in ("Rss", "Pss", "Pss_Anon", "Pss_Shmem")}


def pinned() -> float | None:
    found = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    if "nr_foll_pin_acquired" not in found:
        return None
    pages = int(found["nr_foll_pin_acquired"]) - int(found["nr_foll_pin_released"])
    return round(pages * 4096 / 2**30, 2)


def measure(model: str, device: str, counts: list[int], free: float) -> list[dict[str, Any]]:
    rows = []
    pipe = pipeline(model, device)
    if device == "cuda":
        torch.cuda.empty_cache()
        held = torch.empty(int(torch.cuda.mem_get_info()[0] - free * 2**30), dtype=torch.uint8, device=device)
    for processes in counts:
        before = pinned()
        handle = wanshim.parallelize_pipeline(pipe, [str(pipe._execution_device)] * processes)
        calls = [called(pipe, model, device) for _ in range(2)]
        own = [host(each.pid) for each in (psutil.Process(), *psutil.Process().children(recursive=True))]
        after = pinned()
        rows.append(
            {
                "processes": processes,
                "guidance_over": handle.plan.guidance,
                "worker_streams": handle.plan.streamed,
                "calls": calls,
                "host_GiB": own,
                "sum_of_Pss_GiB": round(sum(each["Pss"] for each in own), 2),
                "pinned_GiB": None if before is None or after is None else round(after - before, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        handle.remove()
    if device == "cuda":
        del held
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="14B")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--free", type=float, default=24, help="GiB")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = measure(given.model, device, given.processes, given.free)
    gpu = torch.cuda.get_device_name() if device == "cuda" else device
    record = {"gpu": gpu, "torch": torch.__version__, **checkout.state(), "model": given.model, "rows": rows}
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
