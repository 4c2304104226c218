"""One LoRA step of the 14B Wan DiT for ONE sample on one GPU and on all of them, with its peers, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/sequence.py --json benchmarks/results/sequence_2.json
    torchrun --standalone --nproc-per-node 2 benchmarks/sequence.py --cpu

Model, LoRA and checkpointing as in model_split.py. Arms: one GPU (rank 0 alone), `wanshim.shard_sequence`, Ulysses
without overlap (`plain`), and Ulysses over a base sharded by FSDP2 (`fsdp`), what a user of torch would write. Prints
seconds a step (median after a warm-up), the ratio to one GPU, the highest peak of all ranks, and how far loss and LoRA
gradients are from those of one GPU, beside how far two steps of one GPU are from each other.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import model_split as base
from diffsynth.pipelines import wan_video
from training_peers import shard_fully

import wanshim

Gradients = dict[str, torch.Tensor]


class PlainUlysses:
    """All-to-all of q, k, v and back, even sizes only, each awaited at once; gradients summed after backward."""

    def __init__(self, model: Any) -> None:
        self.rank, self.size, self.on = dist.get_rank(), dist.get_world_size(), True
        for block in model.blocks:
            block.register_forward_pre_hook(partial(self._enter, first=block is model.blocks[0]))
            attention = block.self_attn.attn
            attention.forward = partial(self._attend, attention.forward, attention)
        model.head.register_forward_pre_hook(lambda _, args: (_Gathered.apply(args[0]), *args[1:]) if self.on else None)

    def _enter(self, block: Any, args: Any, first: bool) -> Any:
        if not self.on:
            return None
        x, context, t_mod, freqs = args
        x = x.chunk(self.size, 1)[self.rank].contiguous() if first else x
        return x, context, t_mod, freqs.chunk(self.size, 0)[self.rank]

    def _attend(self, forward: Any, attention: Any, *qkv: torch.Tensor) -> torch.Tensor:
        if not self.on:
            return forward(*qkv)
        heads, attention.num_heads = attention.num_heads, attention.num_heads // self.size
        try:
            return _Swapped.apply(forward(*(_Swapped.apply(t, True) for t in qkv)), False)
        finally:
            attention.num_heads = heads

    def sum_gradients(self, model: Any) -> None:
        trained = [p for p in model.parameters() if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in trained])
        dist.all_reduce(flat)
        for parameter, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
            parameter.grad = piece.view_as(parameter)


class _Swapped(torch.autograd.Function):
    """(b, s/P, c) to (b, s, c/P), or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to_heads: bool) -> torch.Tensor:
        ctx.to_heads = to_heads
        return _swap(x, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _swap(gradient, not ctx.to_heads), None


def _swap(x: torch.Tensor, to_heads: bool) -> torch.Tensor:
    size, (b, s, c) = dist.get_world_size(), x.shape
    pieces = x.view(b, s, size, -1).permute(2, 0, 1, 3) if to_heads else x.view(b, size, -1, c).permute(1, 0, 2, 3)
    sent = pieces.contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    return (
        got.permute(1, 0, 2, 3).reshape(b, size * s, -1)
        if to_heads
        else got.permute(1, 2, 0, 3).reshape(b, -1, size * c)
    )


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu") if args.cpu else torch.device("cuda", torch.cuda.current_device())
        self.host = dist.new_group(backend="gloo", timeout=timedelta(minutes=20))
        self.sample = self._sample()
        self.record: dict[str, Any] = {}
        self.reference: tuple[float, Gradients] | None = None

    def _sample(self) -> dict[str, torch.Tensor]:
        """The same on every rank."""
        generator = torch.Generator(device=self.device).manual_seed(7)
        like: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16, "generator": generator}
        shape = (1, 16, (self.args.frames - 1) // 4 + 1, self.args.height // 8, self.args.width // 8)
        return {
            "latents": torch.randn(shape, **like),
            "target": torch.randn(shape, **like),
            "context": torch.randn((1, 512, self.args.text_dim), **like),
            "timestep": torch.tensor([500.0], device=self.device, dtype=torch.bfloat16),
        }

    def loss(self, model: Any) -> torch.Tensor:
        inputs = dict(self.sample)
        target = inputs.pop("target")
        output = wan_video.model_fn_wan_video(model, **inputs, use_gradient_checkpointing=True)
        return torch.nn.functional.mse_loss(output.float(), target.float())

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - START:5.0f} s] {text}", flush=True)

    def run(
        self, title: str, model: Any, step: Callable[[], torch.Tensor], *, alone: bool = False, scale: float = 1.0
    ) -> None:
        """Time `step`, which leaves gradients in `model`, on all ranks or on rank 0 `alone`."""
        took_part = not alone or self.rank == 0
        seconds, losses, gradients = [], [], []
        for i in range((self.args.repeats + 1) * took_part):
            model.zero_grad()
            if i == 1 and not self.args.cpu:
                torch.cuda.reset_peak_memory_stats()
            self._together(alone)
            begin = time.perf_counter()
            losses.append(step().detach())
            if not self.args.cpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            if alone and i >= self.args.repeats - 1:
                gradients.append(self._gradients(model, scale))
        peak = 0.0 if self.args.cpu else torch.cuda.max_memory_allocated() / 2**30
        if not alone:
            gradients.append(self._gradients(model, scale))  # every rank takes part: FSDP gathers
        dist.barrier(group=self.host)
        peaks: list[float] = [0.0] * self.world
        dist.all_gather_object(peaks, peak, group=self.host)
        if self.rank == 0:
            self._keep(title, seconds, max(peaks), [loss.item() for loss in losses], gradients)
        model.zero_grad()
        gc.collect()
        if not self.args.cpu:
            torch.cuda.empty_cache()

    def _together(self, alone: bool) -> None:
        if not self.args.cpu:
            torch.cuda.synchronize()
        if not alone:
            dist.barrier(group=self.host)

    def _gradients(self, model: Any, scale: float) -> Gradients:
        found = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                if self.rank == 0:
                    found[name.removeprefix("model.")] = gradient.float().cpu() * scale
        return found

    def _keep(
        self, title: str, seconds: list[float], peak: float, losses: list[float], gradients: list[Gradients]
    ) -> None:
        if self.reference is None:
            self.reference = losses[-1], gradients[-1]
        expected_loss, expected = self.reference
        found = gradients[0]
        assert found.keys() == expected.keys()
        distances = [((found[n] - g).norm() / g.norm()).item() for n, g in expected.items() if g.norm() > 0]
        arm = {
            "first": seconds[0],
            "seconds": seconds[1:],
            "median": statistics.median(seconds[1:]),
            "peak_GiB": peak,
            "loss": losses[-1],
            "loss_of_one_GPU": expected_loss,
            "gradient_distance": {"farthest": max(distances), "median": statistics.median(distances)},
        }
        one = self.record.get("one GPU", arm)["median"]
        arm["times_one_GPU"] = one / arm["median"]
        self.record[title] = arm
        self.say(
            f"{title:24} {arm['median']:8.3f} s  {arm['times_one_GPU']:5.3f}x  {peak:6.2f} GiB  loss {losses[-1]:.7f}  "
            f"gradients {max(distances):.2e} at the farthest, {statistics.median(distances):.2e} in the middle"
        )
        if self.args.json:
            about = {"ranks": self.world, "tokens": self.tokens}
            self.args.json.write_text(json.dumps(base.environment(self.args) | about | {"arms": self.record}, indent=1))

    @property
    def tokens(self) -> int:
        frames, height, width = self.sample["latents"].shape[2:]
        return int(frames * height * width // 4)


def step_of(bench: Bench, model: Any, after: Callable[[Any], None] | None = None) -> torch.Tensor:
    loss = bench.loss(model)
    loss.backward()
    if after is not None:
        after(model)
    return loss


def backward_of(trained: Any) -> torch.Tensor:
    loss = trained(torch.zeros(()))
    loss.backward()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a tiny model over gloo")
    parser.add_argument("--arms", default="one,ours,plain,fsdp")
    base.add_sizes(parser)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="a trace of one step of ours on rank 0, for chrome://tracing")
    args = parser.parse_args()
    if args.cpu:
        tiny = {
            "layers": 4,
            "dim": 96,
            "ffn_dim": 128,
            "heads": 4,
            "text_dim": 32,
            "rank": 4,
            "height": 64,
            "width": 64,
        }
        vars(args).update(tiny | {"frames": 9})
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if args.cpu else "cpu:gloo,cuda:nccl", timeout=timedelta(minutes=20))
    bench, arms = Bench(args), args.arms.split(",")
    model = base.build(args, str(bench.device))
    bench.say(f"{bench.tokens} tokens, {bench.world} ranks")
    if "one" in arms:
        bench.run("one GPU", model, partial(step_of, bench, model), alone=True)
    if "ours" in arms:
        handle = wanshim.shard_sequence(model)
        bench.run("shard_sequence", model, partial(step_of, bench, model))
        bench.say(str(handle.plan))
        if args.profile:
            profile(bench, partial(step_of, bench, model))
        handle.remove()
    if "plain" in arms or "fsdp" in arms:
        ulysses = PlainUlysses(model)
        if "plain" in arms:
            bench.run("Ulysses", model, partial(step_of, bench, model, ulysses.sum_gradients))
        if "fsdp" in arms:
            trained = shard_fully(model, bench.device.type, lambda _: bench.loss(model))
            gc.collect()
            bench.run("FSDP2 and Ulysses", trained, partial(backward_of, trained), scale=bench.world)
    dist.barrier(group=bench.host)
    dist.destroy_process_group()


def profile(bench: Bench, step: Callable[[], torch.Tensor]) -> None:
    with torch.profiler.profile() as trace:
        step()
        if not bench.args.cpu:
            torch.cuda.synchronize()
    if bench.rank == 0:
        trace.export_chrome_trace(str(bench.args.profile))


if __name__ == "__main__":
    START = time.perf_counter()
    main()
