"""The sink in one process: dtypes, chunks, back-pressure."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.distributed.decoding.tiny import make_latent, make_vae
from wanshim.core.decoding import parallelize_decode
from wanshim.core.decoding.ranks.output import ChunkPump
from wanshim.errors import RanksFailed

WAIT_S = 60.0  # a bound for a machine under load, not what anything takes


def test_uint8_output_is_the_rounded_float_output() -> None:
    vae, latent = make_vae("2.2"), make_latent(3)
    reference = vae.decode(latent).sample
    handle = parallelize_decode(vae, uint8=True)
    frames = vae.decode(latent).sample
    handle.remove()
    assert frames.dtype == torch.uint8
    assert torch.equal(frames, ((reference + 1) * 127.5).round().to(torch.uint8))


@pytest.mark.parametrize("strict", [True, False])
def test_chunks_arrive_in_order_and_make_up_the_video(strict: bool) -> None:
    vae, latent = make_vae("2.1"), make_latent(5)
    reference = vae.decode(latent).sample
    seen: list[tuple[int, torch.Tensor]] = []
    handle = parallelize_decode(
        vae, strict=strict, chunk=2, on_chunk=lambda frames, start: seen.append((start, frames.clone()))
    )
    rest = vae.decode(latent).sample
    handle.remove()
    assert rest is None
    assert [start for start, _ in seen] == sorted(start for start, _ in seen)
    assert torch.allclose(torch.cat([frames for _, frames in seen], 2), reference, atol=1e-5)


def test_error_in_the_callback_ends_the_decode_with_its_text() -> None:
    vae = make_vae("2.1")

    def refuse(frames: torch.Tensor, start: int) -> None:
        raise ValueError("the disk is full")

    handle = parallelize_decode(vae, on_chunk=refuse)
    with pytest.raises(RanksFailed, match="ValueError: the disk is full"):
        vae.decode(make_latent(3))
    handle.remove()


def test_pump_waits_for_a_slow_callback_instead_of_queueing_more() -> None:
    began, gate, put, taken = threading.Event(), threading.Event(), threading.Event(), []

    def slow(block: torch.Tensor, start: int) -> None:
        began.set()
        gate.wait(WAIT_S)
        taken.append(start)

    pump = ChunkPump(slow, depth=1, patience=WAIT_S)
    block = torch.zeros(1)
    pump.put(block, 0)
    assert began.wait(WAIT_S)
    pump.put(block, 1)
    third = threading.Thread(target=lambda: (pump.put(block, 2), put.set()))
    third.start()
    assert not put.wait(0.1)  # there is room for one
    gate.set()
    assert put.wait(WAIT_S)
    third.join(WAIT_S)
    pump.close()
    assert taken == [0, 1, 2]


def test_pump_whose_callback_never_returns_gives_up_in_time() -> None:
    began, gate = threading.Event(), threading.Event()

    def stuck(block: torch.Tensor, start: int) -> None:
        began.set()
        gate.wait(WAIT_S)

    pump = ChunkPump(stuck, depth=1, patience=0.2)
    block = torch.zeros(1)
    pump.put(block, 0)
    assert began.wait(WAIT_S)  # the callback has the first block now, the queue has room for one
    pump.put(block, 1)
    with pytest.raises(RanksFailed, match=r"on_chunk took no block for 0\.2 s"):
        pump.put(block, 2)
    gate.set()
    pump.cancel()
