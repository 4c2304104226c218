"""The frozen tensors of one block, side by side in one run of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from wanshim.core.shared.host_memory import is_dense, view_of
from wanshim.core.shared.weight_bytes import own_tensors

ALIGNMENT = 512  # as CUDA's allocator gives it: kernels are chosen by alignment too


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, which keeps its identity: only what `.data` points to changes."""

    tensor: torch.Tensor
    path: str  # in the model
    offset: int
    like: torch.Tensor  # meta


@dataclass(frozen=True)
class BlockWeights:
    """All frozen tensors of block `number`; offsets count from `begin` in the host's memory."""

    number: int
    weights: tuple[Weight, ...]
    begin: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes

    def bind(self, memory: torch.Tensor) -> None:
        """Let the tensors lie in this memory: the block's bytes, on the host or in a slot of the ring."""
        for weight in self.weights:
            weight.tensor.data = view_of(memory, weight.like, weight.offset)

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


def room(tensor: torch.Tensor) -> int:
    """Bytes of a tensor up to where the next one may begin."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def lay_out(number: int, tensors: Iterable[tuple[str, torch.Tensor]], begin: int) -> BlockWeights:
    weights, offset = [], 0
    for path, tensor in tensors:
        stride = tensor.stride() if is_dense(tensor) else tensor.contiguous().stride()
        like = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
        weights.append(Weight(tensor, path, offset, like))
        offset += room(tensor)
    return BlockWeights(number, tuple(weights), begin, offset)
