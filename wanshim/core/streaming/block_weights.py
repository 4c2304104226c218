"""The tensors of one block that wait on the host, side by side in one run of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from wanshim.core.shared.host_memory import PAGE, is_dense, view_of
from wanshim.core.shared.weight_bytes import own_tensors

ALIGNMENT = 512  # as CUDA's allocator gives it: kernels are chosen by alignment too


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, which keeps its identity: only what `.data` points to changes."""

    tensor: torch.Tensor
    path: str  # in the model
    offset: int
    place: torch.Tensor  # where it waits on the host


@dataclass(frozen=True)
class BlockWeights:
    """The waiting tensors of block `number`; offsets count from `begin` in the host's memory."""

    number: int
    weights: tuple[Weight, ...]
    begin: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes

    def bind(self, slot: torch.Tensor) -> None:
        """Let the tensors lie in memory of the device that has the block's bytes."""
        for weight in self.weights:
            weight.tensor.data = view_of(slot, weight.place, weight.offset)

    def wait(self) -> None:
        """Let the tensors lie on the host."""
        for weight in self.weights:
            weight.tensor.data = weight.place

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """The block's bytes in the host's memory."""
        return memory[self.begin : self.end]


def can_wait(tensor: torch.Tensor) -> bool:
    """Frozen, plain and not empty. A tensor subclass (a quantised weight) is more than its bytes."""
    plain = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout == torch.strided
    return plain and not tensor.requires_grad and tensor.numel() > 0


def owners(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Path, owner, name and tensor of every parameter and buffer, tied ones as often as they occur."""
    for path, owner in module.named_modules(prefix=prefix, remove_duplicate=False):
        for name, tensor in own_tensors(owner):
            yield f"{path}.{name}".lstrip("."), owner, name, tensor


def used_once(
    model: nn.Module, name: str, blocks: nn.ModuleList, wanted: Callable[[torch.Tensor], bool]
) -> list[list[tuple[str, torch.Tensor]]]:
    """Paths and tensors of each block of `model.name` that are wanted, and used in one place alone."""
    places = Counter(id(tensor) for *_, tensor in owners(model))
    return [
        [(p, t) for p, *_, t in owners(block, f"{name}.{i}") if wanted(t) and places[id(t)] == 1]
        for i, block in enumerate(blocks)
    ]


def room(tensor: torch.Tensor) -> int:
    """Bytes of a tensor up to where the next one may begin."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def bounds_of(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Begin and end of blocks of so many bytes in one memory, each from the begin of a page."""
    bounds: list[tuple[int, int]] = []
    for size in sizes:
        begin = -(-bounds[-1][1] // PAGE) * PAGE if bounds else 0
        bounds.append((begin, begin + size))
    return bounds


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own if it fills one run of memory, else those without gaps."""
    return tensor.stride() if is_dense(tensor) else tensor.contiguous().stride()
