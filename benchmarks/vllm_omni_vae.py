"""Decode and encode of vLLM-Omni's Wan VAEs on one GPU: as its modules are, by its lossless fast path, and by wanshim.

    python benchmarks/vllm_omni_vae.py --json benchmarks/results/vllm_omni_vae_1xH100.json

It needs vLLM-Omni 0.30, and takes random weights. The fast path is installed as `initialize_model` does by default on
CUDA, and wanshim's features serve the same VAE. No tiles are asked for. The first call of an arm is not counted.
Columns: seconds of the fastest call behind it; the eager time over them; the highest peak of those calls in GiB, one of
which may compare; whether the result is that of the eager modules, or by how much it differs at most.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkout
import first_call
import torch
import vae_decode
from vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_wan import DistributedAutoencoderKLWan
from vllm_omni.diffusion.distributed.autoencoders.wan_vae_fastpath import install_wan_vae_fastpath

import wanshim

ARMS = ("eager", "lossless", "strict", "fast")
CALLS = 3


def make_vae(layout: str, *, lossless: bool) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        vae = DistributedAutoencoderKLWan(**vae_decode.LAYOUTS[layout]["config"]).eval().requires_grad_(False)
    vae.to(torch.bfloat16)
    # What `init_distributed` makes on one GPU, without its process group.
    vae.distributed_executor = SimpleNamespace(parallel_size=1, parallel_mode="tile")
    assert not lossless or install_wan_vae_fastpath(vae, level="lossless").installed
    return vae


def timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float, float]:
    """The result, seconds of the fastest call behind the first, and the highest peak of those in GiB."""
    made, seconds = call(), []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return made, min(seconds), torch.cuda.max_memory_allocated() / 2**30


def run(arm: str, verb: str, layout: str, given: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    vae = make_vae(layout, lossless=arm != "eager")
    ours = arm in ("strict", "fast")
    feature = f"vllm_omni.vae_{verb}"
    if ours:
        os.environ["WANSHIM_VAE_FAST"] = str(int(arm == "fast"))
        wanshim.activate(f"none,{feature}")

    def call() -> torch.Tensor:
        made = vae.decode(given).sample if verb == "decode" else vae.encode(given).latent_dist.parameters
        assert isinstance(made, torch.Tensor)
        return made

    made, seconds, peak = timed(call)
    row: dict[str, Any] = {"arm": arm, "seconds": seconds, "peak_gib": peak}
    if ours:
        reported = wanshim.report(strict=False).row(feature)
        row |= {"state": reported.state, "plan": list(reported.notes), "left": dict(reported.fallbacks)}
        wanshim.deactivate()
    return made, row


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="2.1,2.2")
    parser.add_argument("--verbs", default="decode,encode")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        **{name: version(name) for name in ("diffusers", "vllm-omni")},
        **checkout.state(),
    }
    rows: list[dict[str, Any]] = []
    for layout in args.layouts.split(","):
        for verb in args.verbs.split(","):
            shape = first_call.shapes(layout, verb, small=False)[0]
            given = torch.randn(shape, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)
            given, eager = given.to("cuda", torch.bfloat16), torch.empty(0)
            for arm in ARMS:
                made, row = run(arm, verb, layout, given)
                if arm == "eager":
                    eager, of = made, row["seconds"]
                row |= {"layout": layout, "verb": verb, "shape": shape, "equal": torch.equal(made, eager)}
                row["most"] = (made.float() - eager.float()).abs().max().item()
                rows.append(row)
                same = "equal" if row["equal"] else f"most {row['most']:.3f}"
                said = "; ".join((row.get("state", ""), *row.get("plan", [])[-1:], *row.get("left", {})))
                cells = f"{row['seconds']:6.2f} s {of / row['seconds']:5.2f}x {row['peak_gib']:6.2f} GiB"
                print(f"{layout} {verb} {arm:8} {cells}  {same:10} {said}", flush=True)
                if args.json:
                    text = json.dumps({**about, "rows": rows}, indent=1)
                    args.json.write_text(text + "\n", encoding="utf-8")
                del made
            del eager


if __name__ == "__main__":
    main()
