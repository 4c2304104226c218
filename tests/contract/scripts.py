"""A script of these tests, started as a user starts it, alone or behind a command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
WANSHIM = (sys.executable, "-m", "wanshim")


def run(folder: Path, module: str, *arguments: str, behind: Sequence[str] = ()) -> tuple[list[torch.Tensor], str]:
    """What the script has saved in frames.pt, in a folder that is made for it, and its standard error."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [*behind, sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "frames.pt", weights_only=True), done.stderr


def generate(gpus: int) -> tuple[str, ...]:
    return *WANSHIM, "generate", "--gpus", str(gpus), "--"


def check_shared(folder: Path, module: str, *arguments: str) -> str:
    """Demand that the script has its frames over two processes, by guidance in each call that has it.

    Returns:
        What it said then on its standard error.
    """
    expected, _ = run(folder / "alone", module, *arguments)
    found, said = run(folder / "shared", module, *arguments, behind=generate(2))
    assert all(map(torch.equal, expected, found))
    assert "WanPipeline on cpu, cpu: guidance over 2, bit for bit the frames of one GPU" in said, said
    return said
