"""Text encoder and VAE of a split pipeline that does not fit with them: out of the way, with the same LoRA file."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import ModelLogger

import wanshim
from tests.contract.diffsynth.clip_job import FEATURE, OneClip, make_module
from tests.contract.diffsynth.small_video import VIDEO
from tests.contract.diffsynth.video_job import REST
from wanshim.core.model_split import split_of
from wanshim.core.model_split.side_models import HOST, moved_to
from wanshim.core.shared.weight_bytes import num_bytes
from wanshim.demo import train_lora, wan_checkpoint
from wanshim.errors import FeatureUnavailable

DEVICES = ("cpu", "cpu:0")  # two names of the host, as two cards would have


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> wan_checkpoint.CheckpointFiles:
    made = wan_checkpoint.write(tmp_path_factory.mktemp("checkpoint"))
    wan_checkpoint.register(made)
    return made


def limit(monkeypatch: pytest.MonkeyPatch, **available: int) -> None:
    """A host has no limit of its own: these stand for two cards."""
    limits = {"cpu": available["first"], "cpu:0": available["second"]}
    monkeypatch.setattr("wanshim.core.strategy.limits.available_bytes", lambda device: limits[str(device)])


def base_bytes(module: torch.nn.Module) -> int:
    """Without LoRA, which comes after loading."""
    return sum(p.numel() * p.element_size() for name, p in module.named_parameters() if "lora_" not in name)


def train(module: train_lora.LoraTraining, output: Path) -> bytes:
    from diffsynth.diffusion import runner

    torch.manual_seed(3)
    logger = ModelLogger(str(output), remove_prefix_in_ckpt="pipe.dit.")
    args = Namespace(**VIDEO | REST)
    runner.launch_training_task(Accelerator(gradient_accumulation_steps=2), OneClip(), module, logger, args=args)
    return (output / "epoch-0.safetensors").read_bytes()


def notes() -> str:
    return "\n".join(wanshim.report(strict=False).row(FEATURE).notes)


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param("cpu:0", marks=pytest.mark.sweep), HOST])
def test_side_models_that_do_not_fit_beside_the_weights_leave_while_loading(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    torch.manual_seed(2)
    plain = make_module(files)
    text, vae = num_bytes(plain.pipe.text_encoder), num_bytes(plain.pipe.vae)
    dit = plain.pipe.dit
    stage = base_bytes(dit) - sum(map(base_bytes, dit.blocks[4:]))
    expected = train(plain, tmp_path / "unsplit")
    monkeypatch.setenv("WANSHIM_DEVICES", ",".join(DEVICES))
    monkeypatch.setenv("WANSHIM_SPLIT_AT", "4")
    limit(monkeypatch, first=stage + max(text, vae), second=base_bytes(dit) - stage if place == HOST else 10**12)
    wanshim.activate(f"none,{FEATURE}")
    torch.manual_seed(2)
    module = make_module(files)
    assert split_of(module.pipe.dit) is not None
    moved = {name: moved_to(getattr(module.pipe, name)) for name in ("text_encoder", "vae")}
    assert moved["text_encoder" if text > vae else "vae"] == place
    limit(monkeypatch, first=10**12, second=10**12)
    assert train(module, tmp_path / "split") == expected
    assert "with the same bits: beside it cpu would need" in notes()
    getattr(module.pipe, "text_encoder" if text > vae else "vae").requires_grad_(True)
    with pytest.raises(FeatureUnavailable, match="is to be trained, and it left the first stage's device, which"):
        train(module, tmp_path / "trained")


@pytest.mark.slow
def test_side_models_that_do_not_fit_beside_the_step_leave_before_it(
    files: wan_checkpoint.CheckpointFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    expected = train(make_module(files), tmp_path / "unsplit")
    monkeypatch.setenv("WANSHIM_DEVICES", ",".join(DEVICES))
    monkeypatch.setenv("WANSHIM_PIPELINE", "0")
    wanshim.activate(f"none,{FEATURE}")
    torch.manual_seed(2)
    module = make_module(files)
    pipe = module.pipe
    assert (moved_to(pipe.text_encoder), moved_to(pipe.vae)) == (None, None)
    # with room for the rest of the step, and for all weights at once, but not for both
    limit(monkeypatch, first=num_bytes(pipe.dit) + num_bytes(pipe.text_encoder) + num_bytes(pipe.vae), second=1)
    monkeypatch.setattr(sys.modules["wanshim.core.strategy.search"], "check_fit", lambda *_: ())
    assert train(module, tmp_path / "split") == expected
    assert HOST in {moved_to(pipe.text_encoder), moved_to(pipe.vae)}
    assert "waits in host memory and is copied to cpu for each call" in notes()
