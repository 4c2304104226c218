"""DiffSynth's pipeline over processes on GPUs: frames of guidance bit for bit, of tokens up to rounding."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from wanshim.core.generation import Request, SharedPipeline

pytest.importorskip("diffsynth")
pytestmark = pytest.mark.timeout(900)
DEVICES = [
    pytest.param(("cuda:0", "cuda:0"), marks=pytest.mark.gpu(1), id="one GPU"),
    pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu(2), id="two GPUs"),
]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("kind", ["t2v", "pair", "vace"])
def test_frames_of_two_processes_are_those_of_one(kind: str, devices: tuple[str, str]) -> None:
    from tests.contract.diffsynth import wan_pipelines
    from wanshim.adapters.diffsynth.generate import bind

    pipe = wan_pipelines.MADE[kind]().to("cuda:0")
    expected = wan_pipelines.generate(pipe, kind)
    shared, apart = SharedPipeline(Request(devices=devices)), len(set(devices)) == 2

    def found() -> torch.Tensor:
        return shared.run(partial(bind, pipe), partial(wan_pipelines.generate, pipe, kind))

    try:
        for way, bound in (((2, 1), 0.0), ((1, 2), 1e-4)):
            shared.request = Request(devices=devices, at_most=way)
            assert (found() - expected).abs().max().item() <= bound
            assert shared.plan is not None
            assert (shared.plan.guidance, shared.plan.sequence) == way
        end = time.monotonic() + 120.0
        while apart and not shared.shared_vae_calls and time.monotonic() < end:
            found()  # a machine's first decodes are left to the framework while their kernels are compiled
        assert bool(shared.shared_vae_calls) == apart, "processes on one GPU leave the VAE to one"
    finally:
        shared.close()
