"""A script that offloads its models generates over GPUs as it does alone: it is started as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPT = "tests.contract.diffusers.offloading"
# What offloads layer by layer through accelerate computes on a GPU alone: tests/gpu/generation has it.
WAYS = [("model", "wan"), ("model", "wan22"), ("block", "wan22"), ("leaf", "wan"), ("none", "wan")]


def run(folder: Path, *command: str) -> tuple[list[torch.Tensor], str]:
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, sys.executable, "-m", SCRIPT, *folder.name.split()[:2]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "frames.pt", weights_only=True), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), WAYS)
def test_script_that_offloads_has_its_frames_over_gpus(way: str, kind: str, tmp_path: Path) -> None:
    expected, _ = run(tmp_path / f"{way} {kind}", "env")
    found, said = run(
        tmp_path / f"{way} {kind} shared", sys.executable, "-m", "wanshim", "generate", "--gpus", "2", "--"
    )
    assert all(map(torch.equal, expected, found))
    assert "WanPipeline on cpu, cpu: guidance over 2, bit for bit the frames of one GPU" in said, said
    assert "left to the framework" not in said.replace("one GPU: the guidance scale switches guidance off", ""), said
