"""DiffSynth's pipeline over processes on GPUs: frames of guidance bit for bit, of tokens up to rounding."""

from __future__ import annotations

import gc
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import wanshim
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


@pytest.mark.gpu(1)
def test_models_without_room_for_all_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    import numpy as np
    from diffsynth.configs import VRAM_MANAGEMENT_MODULE_MAPS
    from diffsynth.pipelines.wan_video import ModelConfig, WanVideoPipeline

    from wanshim.demo import wan_checkpoint

    wide = wan_checkpoint.DIT | {"dim": 512, "ffn_dim": 2**17}
    files = wan_checkpoint.write(tmp_path, dit=wide)
    wan_checkpoint.register(files, dit=wide)
    own = VRAM_MANAGEMENT_MODULE_MAPS["diffsynth.models.wan_video_vae.WanVideoVAE"]
    monkeypatch.setitem(VRAM_MANAGEMENT_MODULE_MAPS, f"{wan_checkpoint.__name__}.tiny_vae", own)

    def clip() -> np.ndarray:
        pipe = WanVideoPipeline.from_pretrained(
            torch_dtype=torch.bfloat16,
            device="cuda",
            model_configs=[ModelConfig(path=str(path)) for path in files.models],
            tokenizer_config=ModelConfig(path=str(files.tokenizer)),
            redirect_common_files=False,
        )
        video = pipe(prompt="a clip", seed=1, height=64, width=96, num_frames=5, num_inference_steps=2, tiled=False)
        return np.stack([np.array(image) for image in video])

    expected = clip()
    gc.collect()
    torch.cuda.empty_cache()
    monkeypatch.setenv("WANSHIM_GENERATE", "1")
    wanshim.activate("none,diffsynth.generate")
    request.addfinalizer(wanshim.deactivate)
    request.addfinalizer(partial(torch.cuda.set_per_process_memory_fraction, 1.0))
    room = files.dit.stat().st_size * 2 // 3 + torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    assert np.array_equal(clip(), expected)
    notes = wanshim.report().row("diffsynth.generate").notes
    assert any("WanVideoPipeline has no room on cuda as a whole" in note for note in notes), notes
    assert any("cuda:0 streams blocks of its models from host memory" in note for note in notes), notes
