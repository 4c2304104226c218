"""The decode over NCCL: the same promises as over gloo, and an end for every rank when one of them fails."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.distributed.decoding.ranks import run_ranks, values
from tests.distributed.decoding.test_failure import decode_and_time
from tests.distributed.decoding.tiny import LAYOUTS, make_latent, make_vae
from wanshim.core.decoding import parallelize_decode
from wanshim.core.decoding.ops import FastOperators, StrictOperators

DEADLINE = 15.0


def on_gpu(layout: str, dtype: torch.dtype, frames: int = 5) -> tuple[Any, torch.Tensor]:
    return make_vae(layout, dtype).cuda(), make_latent(frames, 9, 14, dtype=dtype).cuda()


def decode_every_way(rank: int, size: int) -> list[tuple[str, str, str, bool, bool, float]]:
    rows = []
    for layout in LAYOUTS:
        for dtype in (torch.float32, torch.bfloat16):
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            vae, latent = on_gpu(layout, dtype)
            reference = vae.decode(latent).sample
            for mode in ("temporal", "spatial"):
                for strict in (True, False):
                    handle = parallelize_decode(vae, mode=mode, strict=strict, deadline=DEADLINE)
                    out = vae.decode(latent).sample
                    handle.remove()
                    worst = (out.float() - reference.float()).abs().max().item()
                    rows.append((layout, str(dtype), mode, strict, torch.equal(out, reference), worst))
    return rows


@pytest.mark.gpu(2)
def test_decode_over_nccl_keeps_its_promises() -> None:
    for rows in values(run_ranks(decode_every_way, 2, backend="nccl")):
        for layout, dtype, mode, strict, equal, worst in rows:
            case = f"{layout} {dtype} {mode} strict={strict}: differs by {worst}"
            print(case)
            if mode == "temporal" and strict:
                assert equal, case
            elif dtype == "torch.float32":
                assert worst <= 2e-5, case


def fails_on_one_rank(rank: int, size: int, mode: str, strict: bool) -> tuple[Any, bool, float]:
    vae, latent = on_gpu("2.1", torch.bfloat16)
    parallelize_decode(vae, mode=mode, strict=strict, deadline=DEADLINE)
    reference = vae.decode(latent).sample
    if rank == 1:
        kind = StrictOperators if strict else FastOperators
        original, calls = kind.conv, {"left": 20}

        def conv(self: Any, window: Any) -> Any:
            calls["left"] -= 1
            if calls["left"] == 0:
                raise torch.OutOfMemoryError("injected")
            return original(self, window)

        kind.conv = conv  # type: ignore[method-assign]
    failed = decode_and_time(vae, latent)
    start = time.monotonic()
    again = vae.decode(latent).sample
    torch.cuda.synchronize()
    return failed, torch.equal(again, reference), time.monotonic() - start


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("mode", "strict"), [("temporal", True), ("spatial", False)])
def test_decode_over_nccl_out_of_memory_on_one_rank_fails_on_all_and_a_retry_works(mode: str, strict: bool) -> None:
    for (name, text, seconds), same, _ in values(run_ranks(fails_on_one_rank, 2, mode, strict, backend="nccl")):
        assert name == "DecodeFailed"
        assert "rank 1: out of memory" in text
        assert seconds < DEADLINE + 2
        assert same
