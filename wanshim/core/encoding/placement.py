"""The placement of the text encoder: its device, and how much of it is there at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from wanshim.core.shared import gpus
from wanshim.core.shared.safetensors_header import tensors_in
from wanshim.errors import WanshimError

Residence = Literal["whole", "layers"]

# Beside the weights: activations of 512 tokens, the library workspaces of a fresh CUDA context,
# fragmentation.
HEADROOM_BYTES = 2 << 30

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPlan:
    """The placement of one encoder.

    Args:
        device: where its layers compute.
        residence: "whole": all weights lie on `device`; "layers": they lie in host memory, and each layer
            visits.
        resident_dtype: dtype of the weights there ("layers": the checkpoint's where that is narrower;
            each layer is widened on its visit, which is exact).
        weight_bytes: bytes of all weights in `compute_dtype`.
        compute_dtype: dtype in which the layers compute.
        reason: why this device and this residence.
    """

    device: torch.device
    residence: Residence
    resident_dtype: torch.dtype
    compute_dtype: torch.dtype
    weight_bytes: int
    reason: str

    def __str__(self) -> str:
        size = f"{self.weight_bytes / 1e9:.1f} GB in {_short(self.compute_dtype)}"
        how = "whole"
        if self.residence == "layers":
            how = f"layer by layer from {_short(self.resident_dtype)} on the host"
        return f"encoder ({size}) on {self.device}, {how}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of an encoder folder: number of elements and the dtype most of them have."""

    elements: int
    dtype: torch.dtype


def read_checkpoint(folder: Path, *, default: torch.dtype) -> Checkpoint:
    """Count the weights below `folder` from the headers of its safetensors files.

    Other formats do not say it without being read whole: there the file sizes count as `default`.

    Raises:
        WanshimError: the folder holds no weights.
    """
    elements: dict[torch.dtype, int] = {}
    for _, name, shape in tensors_in(sorted(folder.glob("*.safetensors"))):
        dtype = _DTYPES.get(name, torch.uint8)
        elements[dtype] = elements.get(dtype, 0) + math.prod(shape)
    if elements:
        return Checkpoint(sum(elements.values()), max(elements, key=elements.__getitem__))
    size = sum(path.stat().st_size for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern))
    if not size:
        raise WanshimError(
            f"The folder {str(folder)!r} holds no weights", expected="*.safetensors, *.bin or *.pt files"
        )
    return Checkpoint(size // default.itemsize, default)


def choose_device(
    where: str, local: torch.device, peer_bytes: Callable[[], Mapping[torch.device, int]]
) -> tuple[torch.device, str]:
    """The encoder's device, and why that one.

    Args:
        where: "auto" and "local" mean the rank's own device, "cpu" the host, "most_free" the GPU of this
            machine with the most free memory, and anything else names a device.
        local: the rank's own device.
        peer_bytes: free bytes of every GPU of this machine; asked for "most_free" only.

    Raises:
        WanshimError: `where` names no device.
    """
    if where in ("auto", "local"):
        return local, "the rank's own device"
    if where == "most_free":
        if local.type == "cpu":
            return local, "the rank's own device, as it has no GPU"
        free = peer_bytes()
        return max(free, key=lambda gpu: (free[gpu], gpu == local)), "the GPU with the most free memory"
    try:
        return torch.device(where), f"asked for {where}"
    except RuntimeError as error:
        raise WanshimError(
            f"{where!r} names no place for the text encoder",
            expected="auto, local, cpu, most_free, or a device such as cuda:1",
        ) from error


def plan_encoder(
    checkpoint: Checkpoint,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    why: str,
    free_bytes: Callable[[torch.device], int | None],
) -> EncoderPlan:
    """Choose how much of the encoder lies on its device; pure, so that a test can ask it about any machine.

    Args:
        checkpoint: what there is to load.
        compute_dtype: the framework's configured precision.
        device: where it computes, as `choose_device` chose.
        why: the reason for that device.
        free_bytes: free memory of a GPU, in bytes.

    Raises:
        WanshimError: not even one layer at a time fits.
    """
    weight_bytes = checkpoint.elements * compute_dtype.itemsize
    # Weights of eight bits or of whole numbers are no values yet: the framework makes them when it loads.
    stored = checkpoint.dtype if checkpoint.dtype.is_floating_point else compute_dtype
    narrow = min(stored, compute_dtype, key=lambda dtype: dtype.itemsize)

    def plan(residence: Residence, resident: torch.dtype, reason: str) -> EncoderPlan:
        return EncoderPlan(
            device=device,
            residence=residence,
            resident_dtype=resident,
            compute_dtype=compute_dtype,
            weight_bytes=weight_bytes,
            reason=reason,
        )

    if device.type == "cpu":
        return plan("whole", compute_dtype, why)
    free = free_bytes(device) or 0
    if weight_bytes + HEADROOM_BYTES <= free:
        return plan("whole", compute_dtype, f"{why}; {free / 1e9:.1f} GB free")
    if free < HEADROOM_BYTES:
        raise WanshimError(
            f"{device} has {free / 1e9:.1f} GB free, too little for even one layer of the text encoder",
            expected=f"at least {HEADROOM_BYTES / 1e9:.1f} GB",
            topic="encode_on_cpu",
        )
    return plan("layers", narrow, f"{why}; only {free / 1e9:.1f} GB free")


def peer_gpu_bytes() -> dict[torch.device, int]:
    """Free bytes of every GPU this process may use, read from the driver so that no CUDA context is made there."""
    with gpus.opened() as nvml:
        handles = {torch.device("cuda", i): gpus.handle(nvml, i) for i in range(torch.cuda.device_count())}
        return {device: int(nvml.nvmlDeviceGetMemoryInfo(handle).free) for device, handle in handles.items()}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
