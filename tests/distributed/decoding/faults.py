"""What one rank does where faults are planted: each call beside the framework's own, and what the plan says of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from wanshim.core.decoding import VaePlan, parallelize_decode, parallelize_encode
from wanshim.core.decoding.modes import temporal
from wanshim.core.decoding.operators.base import FastOperators, StrictOperators
from wanshim.core.decoding.operators.strict_cuda import StrictCudaOperators
from wanshim.core.decoding.run import CallRun
from wanshim.core.shared.kernel_compiler import Kernel
from wanshim.core.shared.kernel_launch import Launch

from .tiny import encode, make_latent, make_vae, make_video

FAULTS = ("none", "exchange", "operator of the last rank", "framework of the last rank")
Told = dict[str, list[tuple[bool, str, str]]]


@dataclass(frozen=True)
class Uncompared:
    """Two calls, of which the first could not be compared.

    Args:
        equal: had each the framework's frames?
        claims: what the plan claims after each.
        seconds: of both.
        said: why they were not compared, in the log's words.
    """

    equal: list[bool]
    claims: list[str]
    seconds: float
    said: list[str]


def calls(rank: int, size: int, device: str = "cpu") -> Told:
    """By fault, of a decode and an encode: whether two calls were equal, the plan's claim, why calls were left."""
    device = f"{device}:{rank}" if device == "cuda" else device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    vae, latent, video = make_vae("2.1").to(device), make_latent(7, batch=2), make_video(17, 48, 64)
    latent, video = latent.to(device), video.to(device)
    expected = vae.decode(latent).sample, encode(vae, video)
    told: Told = {}
    for fault in FAULTS:
        told[fault] = []
        with pytest.MonkeyPatch.context() as patch:
            _plant(fault, rank == size - 1, patch)
            for parallelize, call, own in (
                (parallelize_decode, lambda: vae.decode(latent).sample, expected[0]),
                (parallelize_encode, lambda: encode(vae, video), expected[1]),
            ):
                handle = parallelize(vae, mode="temporal", engines=False, deadline=40.0)
                handle.wait_for_kernels((latent if parallelize is parallelize_decode else video).shape)
                if fault == "framework of the last rank" and rank == size - 1:
                    module = vae.decoder if parallelize is parallelize_decode else vae.encoder
                    hook = module.register_forward_hook(lambda *_: None)
                found = [call() for _ in range(2)]
                equal = all(torch.equal(each, own) for each in found)
                told[fault].append((equal, handle.plan.claim if handle.plan else "", "; ".join(handle._reasons)))
                handle.remove()
                if fault == "framework of the last rank" and rank == size - 1:
                    hook.remove()
    return told


def _plant(fault: str, last: bool, patch: pytest.MonkeyPatch) -> None:
    if fault == "exchange":
        own = temporal.begin_swap

        def begin_swap(comm: Any, step: str, sends: Any, targets: Any) -> Callable[[], None]:
            complete = own(comm, step, sends, targets)

            def late() -> None:
                complete()
                for target, _ in targets:
                    target[-1] *= 1 + 2**-6

            return late

        patch.setattr(temporal, "begin_swap", begin_swap)
    elif fault == "operator of the last rank" and last:
        spoil_convolutions(patch)


def spoil_convolutions(patch: pytest.MonkeyPatch) -> None:
    """The last video of a batch loses a bit in each strict convolution."""
    for kind in (StrictOperators, StrictCudaOperators):
        own = kind.conv

        def spoiled(self: Any, window: Any, own: Any = own) -> Any:
            out = own(self, window)
            out.main[-1, 0] *= 1 + 2**-6
            return out

        patch.setattr(kind, "conv", spoiled)


def compiles(rank: int, size: int) -> tuple[bool, bool, str, list[bool]]:
    """Two decodes; while the first comes, the last rank's kernels are being compiled."""
    vae, latent = make_vae("2.1"), make_latent(7)
    expected, handle = vae.decode(latent).sample, parallelize_decode(vae, deadline=40.0)
    kernel = Kernel(Launch(None, (), (), ()), torch.device("cuda"))
    if rank < size - 1:
        kernel.done.set()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle.parallel.operators, "kernels_of", lambda *call: [kernel])
        found.append(vae.decode(latent).sample)
        left = handle.parallel.plan is None
        kernel.done.set()
        found.append(vae.decode(latent).sample)
    taken = handle.parallel.plan is not None and handle.parallel.plan.mode == "temporal"
    handle.remove()
    return left, taken, "; ".join(handle._reasons), [torch.equal(each, expected) for each in found]


def at_convolution(number: int, action: Callable[[], object]) -> None:
    """Let this process's convolution `number` from now on call `action`, once, whichever operators are used. Those of a
    dry run do not count."""
    calls = {"left": number}
    for kind in (StrictOperators, StrictCudaOperators, FastOperators):
        original = kind.conv

        def conv(self: Any, window: Any, original: Any = original) -> Any:
            calls["left"] -= not window.data.is_meta
            if calls["left"] == 0 and not window.data.is_meta:
                action()
            return original(self, window)

        kind.conv = conv  # type: ignore[method-assign]


def at_convolution_of_call(handle: Any, number: int, action: Callable[[], object]) -> None:
    """As `at_convolution`, but the short call that is compared, which precedes a first one, does not count."""
    own = CallRun._attempt

    def attempt(self: CallRun, plan: VaePlan, *, compares: bool) -> Any:
        if self.operators is handle.parallel.operators and not compares:
            CallRun._attempt = own  # type: ignore[method-assign]
            at_convolution(number, action)
        return own(self, plan, compares=compares)

    CallRun._attempt = attempt  # type: ignore[method-assign]


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("injected")


class _Said(logging.Handler):
    """Keeps the lines of wanshim's log that say why a call was not compared."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("not compared"):
            self.lines.append(record.getMessage())


def uncompared(vae: Any, latent: torch.Tensor, *, breaks: bool) -> Uncompared:
    """Decode twice in mode temporal; the short call that is compared before runs out of memory here, if it `breaks`."""
    log, said = logging.getLogger("wanshim.decoding"), _Said()
    expected = vae.decode(latent).sample
    handle = parallelize_decode(vae, mode="temporal", engines=False, deadline=20.0)
    handle.wait_for_kernels(latent.shape)  # or the first call would be the framework's
    if breaks:
        at_convolution(20, run_out_of_memory)
    found = Uncompared([], [], 0.0, said.lines)
    log.addHandler(said)
    log.setLevel(logging.INFO)
    start = time.monotonic()
    for _ in range(2):
        found.equal.append(torch.equal(vae.decode(latent).sample, expected))
        found.claims.append(handle.plan.claim)
    log.removeHandler(said)
    handle.remove()
    return replace(found, seconds=time.monotonic() - start)
