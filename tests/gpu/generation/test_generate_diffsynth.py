"""DiffSynth's pipeline over processes on GPUs: frames of guidance bit for bit, of tokens up to rounding."""

from __future__ import annotations

from functools import partial

import pytest

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
    shared = SharedPipeline(Request(devices=devices))
    try:
        for way, bound in (((2, 1), 0.0), ((1, 2), 1e-4)):
            shared.request = Request(devices=devices, at_most=way)
            found = shared.run(partial(bind, pipe), partial(wan_pipelines.generate, pipe, kind))
            assert shared.plan is not None
            assert (shared.plan.guidance, shared.plan.sequence) == way
            assert (found - expected).abs().max().item() <= bound
        assert bool(shared.shared_vae_calls) == (len(set(devices)) == 2), "processes on one GPU leave the VAE to one"
    finally:
        shared.close()
