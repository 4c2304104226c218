"""The negative prompt on several ranks: FastVideo 0.2.x's way against ours, cold and warm, in one run.

    python benchmarks/prompt_encoding.py --work /tmp/umt5 --json benchmarks/results/prompt_encoding.json

The encoder is transformers' UMT5EncoderModel with random weights in the published sizes of UMT5-XXL, a
checkpoint of five shards, computed in fp32 as FastVideo configures it. One process a rank, a GPU each where
there are enough.

upstream  every rank builds the encoder in fp32; local rank 0 reads each tensor and broadcasts it over NCCL,
as
          FastVideo's weights iterator does; every rank encodes, and drops the encoder
cold      `encode_once` on an empty cache: one rank hashes, loads and encodes, the others wait
layers    as cold, with the encoder resting on the host in the checkpoint's dtype and its blocks visiting the
GPU warm      `encode_once` again, in new processes

Prints, for each, seconds from a common start until the last rank has the embeddings, and each rank's peak of
allocated GPU memory; then whether all embeddings are equal bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

from wanshim.core.encoding import (
    EncoderSource,
    EncodingRequest,
    encode_once,
    visiting_layers,
)
from wanshim.demo.meeting import served_store

FULL = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
TINY = {"vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
TOKENS = 512
SHARDS = 5
Tensors = dict[str, torch.Tensor]


def config(args: argparse.Namespace) -> UMT5Config:
    sizes = FULL if args.size == "full" else TINY
    return UMT5Config(feed_forward_proj="gated-gelu", dropout_rate=0.0, **sizes)


def write_checkpoint(args: argparse.Namespace, device: torch.device) -> Path:
    """Random weights in `--stored`, in shards of whole blocks; made on the GPU, where that takes no time."""
    folder = args.work / "text_encoder"
    folder.mkdir(parents=True, exist_ok=True)
    (args.work / "tokenizer").mkdir(exist_ok=True)
    (args.work / "tokenizer" / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(config(args).to_dict()))
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in UMT5EncoderModel(config(args)).state_dict().items()}
    shapes.pop("encoder.embed_tokens.weight", None)
    generator = torch.Generator(device=device).manual_seed(0)
    names = list(shapes)
    for shard in range(SHARDS):
        weights = {
            name: (torch.randn(shapes[name], generator=generator, device=device) * shapes[name][-1] ** -0.5)
            .to(getattr(torch, args.stored))
            .cpu()
            for name in names[shard::SHARDS]
        }
        save_file(weights, folder / f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors")
    return folder


def parameters(args: argparse.Namespace) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in UMT5EncoderModel(config(args)).parameters())


def build(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, *, shared: bool) -> UMT5EncoderModel:
    """The encoder on `device` in `dtype`; with `shared`, local rank 0 reads and broadcasts each tensor."""
    with torch.device("meta"):
        model = UMT5EncoderModel(config(args))
    model.set_input_embeddings(model.shared)  # one table: `to_empty` would make two of the tied ones
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    parameters = dict(model.named_parameters())
    reader = not shared or dist.get_rank() == 0
    place = str(device) if shared else "cpu"
    for path in sorted((args.work / "text_encoder").glob("*.safetensors")):
        with safe_open(path, framework="pt", device=place) as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if reader:
                    tensor = file.get_tensor(name)
                else:
                    shape = file.get_slice(name).get_shape()
                    tensor = torch.empty(shape, dtype=getattr(torch, args.stored), device=device)
                if shared:
                    dist.broadcast(tensor, 0)
                parameters[name].copy_(tensor)
    return model


@torch.no_grad()
def forward(model: UMT5EncoderModel, device: torch.device) -> torch.Tensor:
    """Embeddings (1, 512, d_model) in bf16 of a fixed prompt."""
    ids = torch.arange(TOKENS, device=device).remainder(290)[None] + 3
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.to(torch.bfloat16)


def upstream(args: argparse.Namespace, device: torch.device) -> torch.Tensor:
    model = build(args, device, torch.float32, shared=True)
    return forward(model, device)


def whole(args: argparse.Namespace, device: torch.device) -> torch.Tensor:
    return forward(build(args, device, torch.float32, shared=False), device)


def layers(args: argparse.Namespace, device: torch.device) -> torch.Tensor:
    model = build(args, torch.device("cpu"), getattr(torch, args.stored), shared=False)
    blocks, lookups = model.encoder.block, [model.get_input_embeddings()]
    with visiting_layers(model, blocks, device=device, dtype=torch.float32, lookups=lookups):
        return forward(model, device)


def once(encode: Callable[..., torch.Tensor], cache: str) -> Callable[..., torch.Tensor]:
    def run(args: argparse.Namespace, device: torch.device) -> torch.Tensor:
        source = EncoderSource(
            encoder=args.work / "text_encoder",
            tokenizer=args.work / "tokenizer",
            tokenizer_args={"max_length": TOKENS},
            precision="fp32",
        )
        request = EncodingRequest(prompt="fixed tokens", sources=(source,))
        found = encode_once(
            lambda: {"embeds": encode(args, device)}, request, device=device, cache_dir=args.work / cache
        )
        return found.tensors["embeds"]

    return run


ARMS = {
    "upstream": upstream,
    "cold": once(whole, "cache"),
    "layers": once(layers, "cache-layers"),
    "warm": once(whole, "cache"),
}


def rank_main(args: argparse.Namespace) -> None:
    """One rank: run its arms one after another and leave what it measured in `<arm>-<rank>.json`."""
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", args.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= args.ranks else "gloo"
    dist.init_process_group(backend, rank=args.rank, world_size=args.ranks)
    torch.ones(1, device=device).add_(1)
    dist.barrier()  # starts the communicator, which no arm is to pay for
    for arm in args.arms.split(","):
        measured, embeds = measure(ARMS[arm], args, device)
        save_file({"embeds": embeds.cpu()}, args.work / f"{arm}-{args.rank}.safetensors")
        (args.work / f"{arm}-{args.rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def measure(
    arm: Callable[..., torch.Tensor], args: argparse.Namespace, device: torch.device
) -> tuple[dict[str, float], torch.Tensor]:
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    dist.barrier()
    started = time.perf_counter()
    embeds = arm(args, device)
    if cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    result = embeds.numel() * embeds.element_size()
    peak = torch.cuda.max_memory_allocated(device) - before if cuda else 0
    reserved = torch.cuda.memory_reserved(device) if cuda else 0
    dist.barrier()
    return {
        "seconds": seconds,
        "peak_bytes": peak,
        "peak_bytes_beside_embeddings": max(0, peak - result),
        "reserved_after_bytes": reserved,
    }, embeds


def start_ranks(args: argparse.Namespace, arms: str) -> None:
    common = ["--work", str(args.work), "--size", args.size, "--stored", args.stored, "--device", args.device]
    common += ["--ranks", str(args.ranks), "--arms", arms]
    command = [sys.executable, __file__, *common, "--rank"]
    with served_store() as variables:
        environment = {**os.environ, **variables}
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(args.ranks)]
        failed = [rank.wait(timeout=args.limit) for rank in ranks]
    if any(failed):
        raise SystemExit(f"a rank of {arms} failed")


def summarize(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    ranks = [json.loads((args.work / f"{arm}-{rank}.json").read_text()) for rank in range(args.ranks)]
    return {
        "seconds": round(max(rank["seconds"] for rank in ranks), 3),
        "peak_GB": [round(rank["peak_bytes"] / 1e9, 3) for rank in ranks],
        "encoder_bytes": [rank["peak_bytes_beside_embeddings"] for rank in ranks],
        "reserved_after_GB": [round(rank["reserved_after_bytes"] / 1e9, 3) for rank in ranks],
    }


def embeddings(args: argparse.Namespace, arm: str) -> list[torch.Tensor]:
    files = [args.work / f"{arm}-{rank}.safetensors" for rank in range(args.ranks)]
    found = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            found.append(file.get_tensor("embeds"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint and caches, 12 to 23 GB")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--stored", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one start of the ranks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--arms", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "8")
    if args.rank >= 0:
        rank_main(args)
        return
    count = parameters(args)
    print(f"the encoder has {count / 1e9:.2f} billion parameters, {4 * count / 1e9:.1f} GB in fp32", flush=True)
    started = time.perf_counter()
    write_checkpoint(args, torch.device("cuda:0" if args.device == "cuda" else "cpu"))
    print(f"checkpoint written in {time.perf_counter() - started:.1f} s", flush=True)
    if args.device == "cuda":
        torch.cuda.empty_cache()
    start_ranks(args, "upstream,cold,layers")
    start_ranks(args, "warm")
    report(args)


def report(args: argparse.Namespace) -> None:
    arms = {arm: summarize(args, arm) for arm in ARMS}
    reference = embeddings(args, "upstream")[0]
    equal = {arm: all(torch.equal(found, reference) for found in embeddings(args, arm)) for arm in ARMS}
    for arm, row in arms.items():
        print(
            f"{arm:9} {row['seconds']:8.3f} s   peak GB {row['peak_GB']}   encoder bytes {row['encoder_bytes']}   "
            f"equal to upstream: {equal[arm]}"
        )
    ratio = arms["warm"]["seconds"] / arms["upstream"]["seconds"]
    print(f"warm / upstream: {ratio:.4f}; cold / upstream: {arms['cold']['seconds'] / arms['upstream']['seconds']:.3f}")
    if args.json:
        args.json.write_text(json.dumps(_record(args, arms, equal), indent=1))


def _record(args: argparse.Namespace, arms: dict[str, Any], equal: dict[str, bool]) -> dict[str, Any]:
    cuda = args.device == "cuda"
    return {
        "benchmark": "prompt_encoding",
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "gpus": torch.cuda.device_count() if cuda else 0,
        "torch": torch.__version__,
        **checkout.state(),
        "arguments": {"size": args.size, "stored": args.stored, "ranks": args.ranks, "device": args.device},
        "arms": arms,
        "equal_to_upstream": equal,
    }


if __name__ == "__main__":
    main()
