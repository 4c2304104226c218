"""The random states that training draws from: torch's on the CPU and on one device, numpy's and Python's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of this process, as tensors, lists and numbers."""
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss_next]}
    if (numpy := sys.modules.get("numpy")) is not None:  # nobody has drawn from what nobody imported
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        states["numpy"] = [str(name), keys.tolist(), int(position), int(has_gauss), float(gauss)]
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def generator_state(device: torch.device) -> torch.Tensor:
    """The state from which torch draws next on a device; no wait for the device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Draw from now on what the process draws whose states these are."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
