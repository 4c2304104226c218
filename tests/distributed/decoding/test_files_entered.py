"""A call of a VAE stays short to follow: the files of wanshim that the second strict decode of a size enters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import wanshim
from wanshim.core.decoding import parallelize_decode

from .ranks import run_ranks, values
from .tiny import make_latent, make_vae

ROOT = Path(wanshim.__file__).resolve().parent.parent
MOST = 20


def entered_by_decode(rank: int, size: int) -> tuple[bool, list[str]]:
    vae, latent = make_vae("2.1"), make_latent(5)
    expected = vae.decode(latent).sample
    handle = parallelize_decode(vae)
    vae.decode(latent)
    files: set[str] = set()

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        found = vae.decode(latent).sample
    finally:
        sys.setprofile(None)
    handle.remove()
    paths = (Path(file).resolve() for file in files)
    product = [path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT)]
    return torch.equal(found, expected), sorted(
        str(path) for path in product if path.parts[0] in ("wanshim", "adapters")
    )


def test_second_strict_decode_on_two_ranks_enters_few_files() -> None:
    for equal, files in values(run_ranks(entered_by_decode, 2)):
        assert equal
        assert "wanshim/core/decoding/call.py" in files
        assert len(files) <= MOST, "\n".join(files)
