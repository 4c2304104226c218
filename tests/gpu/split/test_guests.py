"""Text encoder and VAE that leave the first GPU: the LoRA file of one GPU, byte for byte."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import ModelLogger
from PIL import Image

import wanshim
from tests.contract.diffsynth.test_split_guests import VIDEO
from tests.contract.diffsynth.test_split_memory import REST
from wanshim.cli.demo import train_lora, wan_checkpoint
from wanshim.core.placement import split_of
from wanshim.core.placement.lodging import HOST, lodging_of

pytestmark = [pytest.mark.gpu(2), pytest.mark.usefixtures("deterministic_kernels")]


class Clips(torch.utils.data.Dataset):  # type: ignore[type-arg]
    load_from_cache = False

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, object]:
        frames = [Image.new("RGB", (48, 32), (40 * frame, 90 * index, 120)) for frame in range(5)]
        return {"video": frames, "prompt": "a clip"}


def trained(files: wan_checkpoint.CheckpointFiles, folder: Path) -> tuple[bytes, train_lora.LoraTraining]:
    from diffsynth.diffusion import runner

    torch.manual_seed(2)
    module = train_lora.LoraTraining(files, torch.device("cuda:0"), rank=4, checkpointing=True)
    torch.manual_seed(3)
    logger = ModelLogger(str(folder), remove_prefix_in_ckpt="pipe.dit.")
    args = Namespace(**VIDEO | REST)
    runner.launch_training_task(Accelerator(), Clips(), module, logger, args=args)
    return (folder / "epoch-0.safetensors").read_bytes(), module


@pytest.mark.parametrize("place", ["cuda:1", HOST])
def test_guests_that_leave_the_first_gpu_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    files = wan_checkpoint.write(tmp_path / "checkpoint")
    wan_checkpoint.register(files)
    expected, _ = trained(files, tmp_path / "unsplit")
    monkeypatch.setenv("WANSHIM_DEVICES", "cuda:0,cuda:1")
    leaving = dict.fromkeys(("text_encoder", "vae"), place)  # as if they did not fit
    monkeypatch.setattr("wanshim.core.placement.lodging.find_lodging", lambda guests, *_: leaving if guests else {})
    wanshim.activate("diffsynth.model_split")
    found, module = trained(files, tmp_path / "split")
    assert split_of(module.pipe.dit) is not None
    assert {lodging_of(module.pipe.text_encoder), lodging_of(module.pipe.vae)} == {place}
    assert {str(p.device) for p in module.pipe.vae.parameters()} == {"cpu" if place == HOST else place}
    assert found == expected
