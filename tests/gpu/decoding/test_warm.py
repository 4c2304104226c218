"""`wanshim warm` on a GPU, by its command, and the first call of a process after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZE = "128x192x9"
FIRST_CALL = """
import logging, torch, diffusers, wanshim
logging.basicConfig()
torch.set_grad_enabled(False)
with torch.device("cuda"):
    vae = diffusers.AutoencoderKLWan().eval().requires_grad_(False).to(torch.bfloat16)
for strict in (True, False):
    handle = wanshim.parallelize_decode(vae, strict=strict)
    handle.wait_for_kernels()
    vae.decode(torch.randn(1, 16, 3, 16, 24, device="cuda", dtype=torch.bfloat16))
    handle.remove()
"""


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"HOME": str(home)}
    return subprocess.run(
        [sys.executable, *arguments], env=variables, text=True, capture_output=True, check=True, timeout=280
    )


@pytest.mark.gpu(1)
def test_first_calls_after_warm_search_for_nothing(tmp_path: Path) -> None:
    pytest.importorskip("cudnn")
    shown = run(tmp_path, "-m", "wanshim", "warm", "--size", SIZE, "--decode").stdout
    assert "cuDNN's engines are known on" in shown
    assert "of no use here" not in run(tmp_path, "-m", "wanshim", "doctor").stdout
    kept = sorted(path.name for path in (tmp_path / ".cache/wanshim/convolutions").iterdir())
    assert "timing cuDNN's engines" not in run(tmp_path, "-c", FIRST_CALL).stderr
    assert kept == sorted(path.name for path in (tmp_path / ".cache/wanshim/convolutions").iterdir())
