"""`wanshim warm` on a GPU, by its command, the first call of a process after it, and kernels compiled beside calls."""

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
    latent = torch.randn(1, 16, 3, 16, 24, device="cuda", dtype=torch.bfloat16)
    handle.wait_for_kernels(latent.shape)
    vae.decode(latent)
    handle.remove()
"""
# A kernel that a dry run lacks is compiled within the call that launches it.
CALLS = """
import sys, threading, torch, triton, wanshim
from wanshim.cli.warm import make_vae
layout, mode = sys.argv[1:]
torch.set_grad_enabled(False)
compiled, main = [], threading.current_thread()

def note(*, src, **about):
    if threading.current_thread() is main:
        compiled.append(str(src.name) + str(src.signature) + str(src.attrs))

def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).clamp(-1, 1)

triton.knobs.compilation.listener = note
vae = make_vae(layout, torch.device("cuda"), torch.bfloat16)
pixels = 16 if layout == "2.2" else 8
for verb, parallelize in (("decode", wanshim.parallelize_decode), ("encode", wanshim.parallelize_encode)):
    handle = parallelize(vae, strict=mode == "strict")
    handle.wait_for_kernels()
    for frames, height, width in ((5, 44, 80), (3, 30, 52)):
        if verb == "decode":
            given = randn(1, vae.config.z_dim, frames, height, width)
        else:
            given = randn(1, 3, 4 * frames - 3, pixels * height, pixels * width)
        handle.wait_for_kernels(given.shape)
        getattr(vae, verb)(given)
        print(verb, height, width, "compiled", *compiled)
        compiled.clear()
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


@pytest.mark.gpu(1)
@pytest.mark.parametrize("mode", ["strict", "fast"])
@pytest.mark.parametrize("layout", ["2.1", "2.2"])
def test_first_call_of_a_size_compiles_no_kernel(layout: str, mode: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("cudnn")  # without it strict runs no convolution channels last
    done = run(tmp_path, "-c", CALLS, layout, mode)
    assert "left to the framework" not in done.stderr
    shown = done.stdout.splitlines()
    assert len(shown) == 4
    assert [line for line in shown if not line.endswith(" compiled")] == []
