"""Which forwards the fast blocks serve."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.flop_counter import FlopCounterMode

from wanshim.core.fast_blocks import FastForward


def test_mode_is_of_the_thread_that_is_in_it() -> None:
    forward, latents = FastForward(print, print), (torch.zeros(1, 4, 3, 8, 8),)
    serves = torch.no_grad()(forward.serves)
    assert serves(latents)
    assert not forward.serves(latents)  # with gradients
    with FlopCounterMode(display=False), ThreadPoolExecutor(1) as other:
        assert not serves(latents)
        assert other.submit(serves, latents).result()
