"""Guidance over two processes on GPUs: frames equal bit for bit, over NCCL and on one GPU; memory; failures."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import wanshim
from tests.contract.diffusers import wan_pipelines
from tests.unit.workers import functions
from wanshim.core.workers import Workers
from wanshim.errors import WorkersFailed

pytestmark = pytest.mark.timeout(900)
DTYPES = [torch.float32, torch.bfloat16]


def frames(pipe: Any, kind: str, **changed: Any) -> torch.Tensor:
    return wan_pipelines.generate(pipe, kind, **changed).cpu()


def check(kind: str, gpus: Any, dtype: torch.dtype) -> None:
    pipe = wan_pipelines.MADE[kind]().to("cuda:0", dtype)
    alone = frames(pipe, kind)
    handle = wanshim.parallelize_pipeline(pipe, gpus)
    try:
        assert torch.equal(alone, frames(pipe, kind))
        assert handle._shared.shared_forwards > 0
        pipe.transformer.proj_out.weight.data *= 1.5
        changed = frames(pipe, kind)
    finally:
        handle.remove()
    assert torch.equal(changed, frames(pipe, kind))
    assert not torch.equal(changed, alone)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["wan", "wan22"])
def test_two_processes_on_one_gpu_have_the_same_frames(kind: str, dtype: torch.dtype) -> None:
    check(kind, ["cuda:0", "cuda:0"], dtype)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", wan_pipelines.MADE)
def test_two_gpus_have_the_same_frames(kind: str, dtype: torch.dtype) -> None:
    check(kind, 2, dtype)


@pytest.mark.parametrize(
    ("gpus", "way"),
    [
        pytest.param(["cuda:0"] * 4, (2, 2), marks=pytest.mark.gpu(1), id="four processes on one GPU"),
        pytest.param("sequence:2", (1, 2), marks=pytest.mark.gpu(2), id="two GPUs"),
        pytest.param("sequence:3", (1, 3), marks=pytest.mark.gpu(4), id="three GPUs"),
        pytest.param("cfg:2,sequence:2", (2, 2), marks=pytest.mark.gpu(4), id="four GPUs"),
    ],
)
@pytest.mark.parametrize("kind", ["wan", "ti2v", "vace"])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_tokens_over_gpus_have_the_same_frames_up_to_rounding(
    kind: str,
    dtype: torch.dtype,
    rounding: float,
    gpus: Any,
    way: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by the kernels of `diffusers.strict_blocks`, which compute in 16 bits."""
    monkeypatch.setitem(wan_pipelines.TRANSFORMER, "num_attention_heads", 5)
    pipe = wan_pipelines.MADE[kind]().to("cuda:0", dtype)
    pipe.transformer.rope.float()
    alone = frames(pipe, kind)
    wanshim.activate("diffusers.strict_blocks")
    handle = wanshim.parallelize_pipeline(pipe, gpus)
    try:
        for _ in range(2):
            assert (frames(pipe, kind) - alone).abs().max() <= rounding
        assert (handle.plan.guidance, handle.plan.sequence) == way
        state = wanshim.report().row("diffusers.strict_blocks").state
        assert state == ("exercised" if dtype == torch.bfloat16 else "applied")
    finally:
        handle.remove()
        wanshim.deactivate()
    assert torch.equal(alone, frames(pipe, kind))


@pytest.mark.gpu(2)
def test_any_tensor_travels_over_nccl() -> None:
    cuda = [torch.device("cuda", index) for index in range(2)]
    model = functions.Scale().to(cuda[0])
    model.plain = tuple(t.to(cuda[0]) for t in model.plain)
    workers = Workers(cuda[0], cuda[1:])
    workers.hold(model)
    try:
        for x in (torch.randn(4, 5), torch.randn(5, 4).t(), torch.randn(1, 5).expand(4, 5)):
            with torch.no_grad():
                here = model(x.to(cuda[0]))
            there = workers.call(0, model, x.to(cuda[0])).result()
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    finally:
        workers.close()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("over", ["cfg:2", "sequence:2"])
def test_a_worker_that_ends_or_hangs_over_nccl_ends_the_call_and_the_next_is_whole(
    over: str, number: signal.Signals
) -> None:
    pipe = wan_pipelines.wan().to("cuda:0")
    handle = wanshim.parallelize_pipeline(pipe, over)
    expected = frames(pipe, "wan")
    (pid,) = handle._shared.pids
    os.kill(pid, number)
    begun = time.monotonic()
    with pytest.raises(WorkersFailed, match=f"process {pid}"):
        frames(pipe, "wan")
    assert time.monotonic() - begun < 60
    assert torch.equal(expected, frames(pipe, "wan"))
    handle.remove()
