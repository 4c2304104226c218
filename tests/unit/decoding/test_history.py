"""What a computation in chunks keeps for the chunks that follow: nothing after the last, so nothing of a picture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.distributed.decoding.tiny import make_latent, make_vae, make_video
from wanshim.core.decoding import parallelize_decode, parallelize_encode
from wanshim.core.decoding.modes.network import History
from wanshim.core.decoding.operators.window import Window

Kept = list[int]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """The number of convolutions with a past that is held, after each window."""
    seen: Kept = []
    complete = History.complete

    def counted(history: History, window: Window, *, last: bool) -> None:
        complete(history, window, last=last)
        seen.append(len(history._tails))

    monkeypatch.setattr(History, "complete", counted)
    return seen


def decode(mode: str, frames: int) -> None:
    vae, latent = make_vae("2.1"), make_latent(frames, 9, 9)
    expected = vae.decode(latent).sample
    handle = parallelize_decode(vae, mode=mode)
    if mode == "tile":
        vae.enable_tiling(64, 64, 48, 48)
        assert vae.decode(latent).sample.shape == expected.shape
    else:
        assert torch.equal(vae.decode(latent).sample, expected)
    assert handle.plan is not None
    assert (handle.plan.mode, handle.plan.chunk) == ("single" if mode == "auto" else mode, 1)


def encode(mode: str, frames: int) -> None:
    vae, video = make_vae("2.1"), make_video(4 * frames - 3)
    expected = vae.encode(video).latent_dist.mode()
    parallelize_encode(vae, mode=mode)
    assert torch.equal(vae.encode(video).latent_dist.mode(), expected)


@pytest.mark.parametrize(("run", "mode"), [(decode, "auto"), (decode, "tile"), (encode, "auto")])
def test_past_is_kept_for_chunks_that_follow_alone(kept: Kept, run: Callable[[str, int], None], mode: str) -> None:
    run(mode, 1)
    assert set(kept) == {0}
    kept.clear()
    run(mode, 3)
    assert max(kept) > 10
    assert kept[-1] == 0
