"""What one rank of the NCCL tests does: import, CUDA and the process group are paid for once by many cases.

cuDNN's engines are searched for a few cases: each size of each convolution costs up to two seconds, and without a
search its heuristics cost a tenth.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from tests.distributed.decoding.faults import (
    Uncompared,
    at_convolution,
    at_convolution_of_call,
    run_out_of_memory,
    uncompared,
)
from tests.distributed.decoding.timed import decode_and_time
from tests.distributed.decoding.tiny import LAYOUTS, QWEN_IMAGE, encode, make_latent, make_vae, make_video
from wanshim.core.decoding import parallelize_decode, parallelize_encode
from wanshim.errors import RanksFailed

DEADLINE = 20.0
STUCK_SECONDS = 45.0  # then every thread's stack goes to stderr


@dataclass(frozen=True)
class Case:
    """One decode or encode of 9 x 14 latents: no split is even."""

    layout: str
    dtype: str
    mode: str
    strict: bool
    frames: int = 5
    axis: str = "auto"
    output: str | int = "all"
    verb: str = "decode"
    engines: bool = False


@dataclass(frozen=True)
class Told:
    """What came of it on one rank."""

    mode: str
    equal: bool
    difference: float
    count: int


@dataclass(frozen=True)
class Failed:
    """How a decode that was made to fail ended here, and whether the retry equalled the decode before."""

    name: str
    text: str
    seconds: float
    again: bool


def every_case() -> Iterator[Case]:
    for layout, dtype in product(LAYOUTS, ("float32", "bfloat16")):
        base = Case(layout, dtype, "temporal", True)
        yield from (base, replace(base, strict=False), replace(base, mode="spatial"))
        yield replace(base, mode="spatial", strict=False, axis="height")
    for layout, dtype in zip(LAYOUTS, ("bfloat16", "float32")):  # all four over gloo: each tile is a size of its own
        yield Case(layout, dtype, "tile", True)
    short = Case("2.1", "bfloat16", "temporal", True, frames=1, output=0)  # ranks that neither decode nor receive
    yield from (short, replace(short, frames=3), replace(short, mode="spatial", frames=3), replace(short, mode="tile"))
    yield from (Case("2.1", "bfloat16", "temporal", True, verb=verb, engines=True) for verb in ("decode", "encode"))
    yield Case("2.1", "bfloat16", "spatial", False, engines=True)
    for verb, dtype in product(("decode", "encode"), ("float32", "bfloat16")):
        image = Case(QWEN_IMAGE, dtype, "spatial", True, frames=1, verb=verb)
        yield from (image, replace(image, strict=False), replace(image, mode="temporal", frames=3))
    for layout, dtype in product(LAYOUTS, ("float32", "bfloat16")):
        base = Case(layout, dtype, "temporal", True, verb="encode")
        yield from (base, replace(base, frames=2), replace(base, frames=1), replace(base, strict=False))
        yield from (replace(base, mode="spatial"), replace(base, mode="spatial", strict=False, axis="height"))


def calls(rank: int, size: int) -> dict[Case, Told]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = {}
    for case in every_case():
        with timed(rank, str(case)):
            found[case] = decode(case) if case.verb == "decode" else encode_once(case)
    return found


def failures(rank: int, size: int) -> dict[str, Failed]:
    ways = {
        "out of memory, spatial, fast": partial(out_of_memory, rank, "spatial", strict=False),
        "different shapes": partial(different_shapes, rank),
    }
    for mode in ("temporal", "spatial"):
        ways[f"out of memory, {mode}, strict"] = partial(out_of_memory, rank, mode)
        ways[f"out of memory in the first call, {mode}"] = partial(out_of_memory_at_first, rank, mode)
        ways[f"encode out of memory, {mode}"] = partial(encode_out_of_memory, rank, mode)
    found = {}
    for name, way in ways.items():
        with timed(rank, name):
            found[name] = way()
    return found


def decode(case: Case) -> Told:
    vae, latent = on_gpu(case.layout, getattr(torch, case.dtype), case.frames)
    pixels = 16 if case.layout == "2.2" else 8
    vae.enable_tiling(6 * pixels, 6 * pixels, 4 * pixels, 4 * pixels)
    vae.use_tiling = case.mode == "tile"
    reference = vae.decode(latent).sample
    handle = parallelize_decode(
        vae,
        mode=case.mode,
        strict=case.strict,
        axis=case.axis,
        output=case.output,
        engines=case.engines,
        deadline=DEADLINE,
    )
    handle.wait_for_kernels(latent.shape)
    out = vae.decode(latent).sample
    assert handle.plan is not None
    handle.remove()
    if out is None:
        return Told(handle.plan.mode, True, 0.0, 0)
    worst = (out.float() - reference.float()).abs().max().item()
    return Told(handle.plan.mode, torch.equal(out, reference), worst, out.numel())


def encode_once(case: Case) -> Told:
    vae, video = video_on_gpu(case.layout, getattr(torch, case.dtype), case.frames)
    reference = encode(vae, video)
    handle = parallelize_encode(
        vae, mode=case.mode, strict=case.strict, axis=case.axis, engines=case.engines, deadline=DEADLINE
    )
    handle.wait_for_kernels(video.shape)
    out = encode(vae, video)
    assert handle.plan is not None
    handle.remove()
    worst = (out.float() - reference.float()).abs().max().item()
    return Told(handle.plan.mode, torch.equal(out, reference), worst, out.numel())


def encode_out_of_memory(rank: int, mode: str) -> Failed:
    vae, video = video_on_gpu("2.1", torch.bfloat16, 5)
    handle = parallelize_encode(vae, mode=mode, engines=False, deadline=DEADLINE, raise_failures=True)
    handle.wait_for_kernels(video.shape)
    before = encode(vae, video)
    if rank == 1:
        at_convolution(12, run_out_of_memory)
    name, text, began = "", "", time.monotonic()
    try:
        encode(vae, video)
    except RanksFailed as error:
        name, text = type(error).__name__, str(error)
    seconds = time.monotonic() - began
    again = torch.equal(encode(vae, video), before)
    handle.remove()
    return Failed(name, text, seconds, again)


def out_of_memory(rank: int, mode: str, *, strict: bool = True) -> Failed:
    vae, latent = on_gpu("2.1", torch.bfloat16, 5)
    handle = parallelize_decode(vae, mode=mode, strict=strict, engines=False, deadline=DEADLINE, raise_failures=True)
    handle.wait_for_kernels(latent.shape)
    before = vae.decode(latent).sample
    if rank == 1:
        at_convolution(20, run_out_of_memory)
    failed = decode_and_time(vae, latent)
    again = torch.equal(vae.decode(latent).sample, before)
    handle.remove()
    return Failed(*failed, again)


def out_of_memory_at_first(rank: int, mode: str) -> Failed:
    """Rank 0 fails in its first call, behind the short one that mode temporal compares. In mode spatial the others
    compare convolutions meanwhile, for which their hosts wait."""
    vae, latent = on_gpu("2.1", torch.bfloat16, 6)
    handle = parallelize_decode(vae, mode=mode, engines=False, deadline=DEADLINE, raise_failures=True)
    handle.wait_for_kernels(latent.shape)  # or the first call would be the framework's
    if rank == 0:
        at_convolution_of_call(handle, 20, run_out_of_memory)
    failed = decode_and_time(vae, latent)
    before = vae.decode(latent).sample
    again = torch.equal(vae.decode(latent).sample, before)
    handle.remove()
    return Failed(*failed, again)


def short_call_out_of_memory(rank: int, size: int) -> Uncompared:
    """Rank 0 fails in the short call while the others compare convolutions, for which their hosts wait."""
    with timed(rank, "out of memory in the short call"):
        return uncompared(*on_gpu("2.1", torch.bfloat16, 6), breaks=rank == 0)


def different_shapes(rank: int) -> Failed:
    vae, latent = on_gpu("2.1", torch.bfloat16, 5)
    handle = parallelize_decode(vae, mode="spatial", engines=False, deadline=DEADLINE, raise_failures=True)
    handle.wait_for_kernels(latent.shape)
    before = vae.decode(latent).sample
    failed = decode_and_time(vae, latent if rank else latent[:, :, :4])
    again = torch.equal(vae.decode(latent).sample, before)
    handle.remove()
    return Failed(*failed, again)


def killed(rank: int, size: int, mode: str) -> Failed:
    """Rank 1 dies in the middle; it must be the last thing a set of processes does."""
    vae, latent = on_gpu("2.1", torch.bfloat16, 21)
    handle = parallelize_decode(vae, mode=mode, engines=False, deadline=DEADLINE, raise_failures=True)
    handle.wait_for_kernels(latent.shape)
    vae.decode(latent)
    if rank == 1:
        at_convolution(200, _die)
    with timed(rank, f"killed, {mode}"):
        return Failed(*decode_and_time(vae, latent), again=True)


def on_gpu(layout: str, dtype: torch.dtype, frames: int) -> tuple[Any, torch.Tensor]:
    return make_vae(layout, dtype).cuda(), make_latent(frames, 9, 14, dtype=dtype).cuda()


def video_on_gpu(layout: str, dtype: torch.dtype, latents: int) -> tuple[Any, torch.Tensor]:
    pixels = 16 if layout == "2.2" else 8
    video = make_video(4 * latents - 3, 9 * pixels, 14 * pixels, dtype=dtype)
    return make_vae(layout, dtype).cuda(), video.cuda()


@contextmanager
def timed(rank: int, name: str) -> Iterator[None]:
    """Say how long a part took; dump the stacks of one that is stuck."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=False)
    start = time.monotonic()
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        print(f"rank {rank} {time.monotonic() - start:6.2f} s {name}", flush=True)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
