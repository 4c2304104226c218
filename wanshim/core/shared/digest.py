"""A digest of a tensor that sees every element's bits and its position, computed where the tensor is.

The bits are taken as words of 32, or of an element's size where elements of 8 or 16 do not fill the last word. Each
word is multiplied by an odd number that its position chooses, by the finalizer of SplitMix64 (Steele, Lea and Flood,
"Fast Splittable Pseudorandom Number Generators", OOPSLA 2014); the products are summed modulo 2**64. All of it is
integer arithmetic: exact, independent of the order of summation, of the device and of strides.

Not a cryptographic hash: it finds mistakes, not forgeries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
BLOCK = 2**21  # words at once: bounds the memory for 64-bit intermediates, to about 50 MB
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
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
    factors = _odd_numbers(min(words.numel(), BLOCK), words.device)
    return _digest(words, factors, torch.empty_like(factors))


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The digest of each tensor, as `digest_on_device` computes it, in few kernels and one transfer for each device.

    Args:
        tensors: as there; each may be on a device of its own.
    """
    found: dict[int, int] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        alike: dict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            if tensor.device == device:
                alike[tensor.dtype, tensor.numel()].append(place)
        most = {(dtype, count): count * max(1, dtype.itemsize // 4) for dtype, count in alike}  # words of a tensor
        factors = _odd_numbers(min(BLOCK, sum(most[key] * len(those) for key, those in alike.items())), device)
        products = torch.empty_like(factors)
        places: list[int] = []
        parts: list[torch.Tensor] = []
        for key, those in alike.items():
            at_once = max(1, BLOCK // max(1, most[key])) if device.type != "cpu" else 1  # kernels to launch
            for start in range(0, len(those), at_once):
                some = those[start : start + at_once]
                words = [_words(tensors[place].detach().reshape(-1)) for place in some]
                places += some
                parts.append(_digest(torch.stack(words) if len(words) > 1 else words[0], factors, products).view(-1))
        found.update(zip(places, torch.cat(parts).tolist(), strict=True))
    return [found[place] for place in range(len(tensors))]


def digest_weights(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A digest of each tensor, as `digest_on_device` computes it, for weights that are compared once.

    On a GPU every element is read. Of a tensor in host memory with more than 2**16 words of 32 bits (or of an element),
    16 runs of 4096 words are read, the first and the last among them: another checkpoint or seed shows in any of them.
    """
    return digests([_sample(tensor) if tensor.device.type == "cpu" else tensor for tensor in tensors])


def _digest(words: torch.Tensor, factors: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """The digest of the words, or of each row of several, which fit in one block together.

    Args:
        factors: of as many positions as a row has, or of a block.
        products: int64, overwritten: memory that is new for every block costs more than the arithmetic.
    """
    count = words.size(-1)
    if words.numel() <= BLOCK:
        return _weighted(words, factors[:count], products)
    blocks = range(0, count, BLOCK)
    sums = torch.empty(len(blocks), dtype=torch.int64, device=words.device)
    for each, start in zip(sums, blocks, strict=True):
        piece = words[start : start + BLOCK]
        each.copy_(_weighted(piece, factors[: piece.numel()], products))
    return (sums * torch.arange(1, 2 * count + 1, 2 * BLOCK, device=words.device)).sum()


def _weighted(words: torch.Tensor, factors: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """The sum of words * factors, or of each row of several."""
    place = products[: words.numel()].view(words.shape)
    if words.is_cpu:  # numpy: on a host with many cores torch's threads take ten times as long to meet as one computes
        return torch.from_numpy(np.asarray(np.multiply(words.numpy(), factors.numpy(), out=place.numpy()).sum(-1)))
    return torch.mul(words, factors, out=place).sum(-1)


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
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)  # the shift is arithmetic: the mask makes it logical
        x *= factor - 2**64  # both constants exceed int64
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x | 1
