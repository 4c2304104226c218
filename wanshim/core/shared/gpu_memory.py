"""Which GPU a device means, and how many of its bytes this process may use."""

from __future__ import annotations

import gc

import torch

# What the caching allocator holds beyond the tensors: fragments and rounding, as a share of the device.
ALLOCATOR_SHARE = 0.02


def indexed(device: str | torch.device) -> torch.device:
    """The device with its index: `cuda` alone, as accelerate names a single process's device, is the current one."""
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def available_bytes(device: str | torch.device, *, to_another: bool = False) -> int | None:
    """Bytes a process may hold on a CUDA device, this one with what it holds there already; None elsewhere.

    The least of what is free (CUDA contexts and other processes count as taken), and the share that
    `torch.cuda.set_per_process_memory_fraction` leaves, less a margin for the allocator.

    Args:
        to_another: a process other than this one, whose memory counts as taken.
    """
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    device = indexed(device)
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * torch.cuda.get_per_process_memory_fraction(device))
    own = 0 if to_another else torch.cuda.memory_reserved(device)
    most = min(free + own, share)
    return int(most * (1 - ALLOCATOR_SHARE))


def free_bytes(device: str | torch.device) -> int | None:
    """Bytes this process may allocate on a CUDA device beside the tensors it holds there; None elsewhere."""
    available = available_bytes(device)
    return None if available is None else max(0, available - torch.cuda.memory_allocated(device))


def is_memory(error: BaseException) -> bool:
    """Whether memory did not suffice, on the GPU or the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)


def release_cached(device: torch.device) -> None:
    """Return the blocks that torch's allocator caches to the CUDA device; nothing elsewhere."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def give_back(device: torch.device) -> None:
    """The same with what only reference cycles hold."""
    gc.collect()
    release_cached(device)
