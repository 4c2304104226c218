"""A decode, its outcome and its time."""

from __future__ import annotations

import time
from typing import Any

import torch

from wanshim.errors import WanshimError


def decode_and_time(vae: Any, latent: torch.Tensor) -> tuple[str, str, float]:
    """The error's name and text, and how long it took to come."""
    start = time.monotonic()
    try:
        vae.decode(latent)
    except WanshimError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start
