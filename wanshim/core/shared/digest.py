"""A digest of a tensor that sees every element's bits and its position, computed where the tensor is.

The bits are taken as words of 32, or of an element's size where elements of 8 or 16 do not fill the last word. Each
word is multiplied by an odd number that its position chooses, by the finalizer of SplitMix64 (Steele, Lea and Flood,
"Fast Splittable Pseudorandom Number Generators", OOPSLA 2014); the products are summed modulo 2**64. All of it is
integer arithmetic: exact, independent of the order of summation, of the device and of strides.

Not a cryptographic hash: it finds mistakes, not forgeries.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_BLOCK = 2**21  # words at once: bounds the memory for 64-bit intermediates, to about 50 MB
_RUNS, _RUN = 16, 4096  # what is read of a large weight in host memory: this many runs of so many words


def digest(tensor: torch.Tensor) -> str:
    """The dtype, the shape and the 64 bits of `digest_on_device`.

    Equal tensors of any strides have equal digests. 0.0 and -0.0 differ, and so do NaNs with different payloads.

    Args:
        tensor: dense, of any shape, dtype and device. Only the digest comes to the host, in one transfer.
    """
    number = digest_on_device(tensor).item() % 2**64
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {number:016x}"


def digest_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits that depend on every element's bits and position: a 0-d int64 on its device, for which no host waits.

    Cheap enough for what is looked at in every step. One changed word always changes the result.

    Args:
        tensor: dense, of any shape, dtype and device.
    """
    words = _words(tensor.detach().reshape(-1))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factors = _odd_numbers(min(words.numel(), _BLOCK), words.device)
    for start in range(0, words.numel(), _BLOCK):
        piece = words[start : start + _BLOCK]
        total += (piece * factors[: piece.numel()]).sum() * (2 * start + 1)
    return total


def digest_weights(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A digest of each tensor, as `digest_on_device` computes it, for weights that are compared once.

    On a GPU every element is read. Of a tensor in host memory with more than 2**16 words of 32 bits (or of an element),
    16 runs of 4096 words are read, the first and the last among them: another checkpoint or seed shows in any of them.
    """
    found = [digest_on_device(_sample(tensor) if tensor.device.type == "cpu" else tensor) for tensor in tensors]
    return [int(each) for each in found]  # all are under way before the first is awaited


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    words = _words(tensor.detach().reshape(-1))
    if words.numel() <= _RUNS * _RUN:
        return words
    starts = ((words.numel() - _RUN) * i // (_RUNS - 1) for i in range(_RUNS))
    return torch.cat([words[start : start + _RUN] for start in starts])


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits where the size allows them, wherever in memory the tensor begins."""
    each = 4 // min(flat.element_size(), 4)
    if each == 1 or flat.numel() % each:
        return flat.view(_WORDS[flat.element_size()])
    aligned = not (flat.storage_offset() % each or flat.data_ptr() % 4)
    return (flat if aligned else flat.clone()).view(torch.int32)


def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """SplitMix64's finalizer of each position, made odd, as int64, whose arithmetic wraps around."""
    x = torch.arange(1, count + 1, device=device) << 32
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)  # the shift is arithmetic: the mask makes it logical
        x *= factor - 2**64  # both constants exceed int64
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x | 1
