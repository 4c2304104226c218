"""Weights of a model's blocks that are streamed from where an offload of the program keeps them page-locked."""

from __future__ import annotations

import torch
from torch import nn

from wanshim.core.model_split.split import find_blocks
from wanshim.core.shared.host_memory import is_dense, view_of
from wanshim.core.streaming.block_weights import BlockWeights, Weight, room, used_once

ELSEWHERE = 1 / 8  # of a model's streamed bytes, at most: more than adapters of a high rank


class PageLocked:
    """The interface of a `HostCopy` to a `Ring`, of weights that stay in their memory: nothing is on its way."""

    descriptors = ()
    is_settled = True

    def wait(self, at: int | None = None) -> None:
        """Return at once."""

    def settle(self, at: int | None = None) -> bool:
        return True

    def has(self, at: int) -> bool:
        return True

    def lock(self, device: torch.device) -> None:
        """Return at once."""

    def load(self, block: BlockWeights, target: torch.Tensor) -> None:
        """Copy a block's weights to a device, behind what is issued there."""
        for weight in block.weights:
            view_of(target, weight.place, weight.offset).copy_(weight.place, non_blocking=True)

    def layouts(self, model: nn.Module) -> list[BlockWeights] | None:
        """Page-locked weights of each block; None: too many lie elsewhere."""
        name, blocks = find_blocks(model)
        found, elsewhere = [], 0
        for number, block in enumerate(used_once(model, name, blocks, lambda t: t.numel() > 0 and is_dense(t))):
            here, offset = [], 0
            for path, tensor in block:
                if is_page_locked(tensor):
                    here.append(Weight(tensor, path, offset, tensor.detach()))
                    offset += room(tensor)
                else:
                    elsewhere += tensor.nbytes
            found.append(BlockWeights(number, tuple(here), 0, offset))
        return found if elsewhere <= ELSEWHERE * sum(block.num_bytes for block in found) else None


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in host memory that a GPU reads by itself."""
    return tensor.device.type == "cpu" and torch.cuda.is_initialized() and tensor.is_pinned()
