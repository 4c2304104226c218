"""Text encoder and VAE that leave the first GPU: the LoRA file of one GPU, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import wanshim
from tests.contract.diffsynth.ddp_jobs import ACCELERATE
from tests.gpu.split import side_models_worker
from wanshim.core.model_split import split_of
from wanshim.core.model_split.side_models import HOST, moved_to
from wanshim.demo import wan_checkpoint

pytestmark = [pytest.mark.gpu(2), pytest.mark.usefixtures("deterministic_kernels")]


@pytest.mark.parametrize("place", ["cuda:1", HOST])
def test_side_models_that_leave_the_first_gpu_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    files = wan_checkpoint.write(tmp_path / "checkpoint")
    wan_checkpoint.register(files)
    expected = side_models_worker.train(files, tmp_path / "unsplit")
    monkeypatch.setenv("WANSHIM_DEVICES", "cuda:0,cuda:1")
    side_models_worker.send_away(monkeypatch, place)
    wanshim.activate("none,diffsynth.model_split")
    module = side_models_worker.train(files, tmp_path / "split")
    assert split_of(module.pipe.dit) is not None
    assert {moved_to(module.pipe.text_encoder), moved_to(module.pipe.vae)} == {place}
    assert {str(p.device) for p in module.pipe.vae.parameters()} == {"cpu" if place == HOST else place}
    assert split_of(expected.pipe.dit) is None
    assert side_models_worker.lora_of(tmp_path / "split") == side_models_worker.lora_of(tmp_path / "unsplit")


def test_side_models_on_the_host_under_ddp_change_no_byte(tmp_path: Path) -> None:
    """DDP takes parameters of one kind of device: those on the host are kept out of it."""
    launch(tmp_path / "plain")
    launch(tmp_path / "split", WANSHIM_DEVICES="cuda:0,cuda:1,cuda:0,cuda:1", GUESTS=HOST)
    for rank in (0, 1):
        assert (tmp_path / "split" / f"side_models{rank}").read_text() == f"{HOST} {HOST}"
    assert side_models_worker.lora_of(tmp_path / "split") == side_models_worker.lora_of(tmp_path / "plain")


def launch(folder: Path, **variables: str) -> None:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *ACCELERATE, "2", "-m", "tests.gpu.split.side_models_worker", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-4000:]
