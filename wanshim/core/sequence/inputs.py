"""Proof that the ranks have the same inputs and the same loss, and that what comes back is finite, without a wait.

All are computed on the device and copied to the host behind the work in progress; whoever reads them comes long after.
Shapes and dtypes also travel through the store (`Watch.called`), for a difference in them stops the next exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from wanshim.core.ranks.watch import disagreement
from wanshim.core.shared.digest import digest_on_device
from wanshim.core.shared.host_memory import pinned

from .group import SequenceGroup


class HostCopy:
    """A small tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.is_cuda:
            self._tensor = pinned(tensor)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self, group: SequenceGroup) -> torch.Tensor:
        if self._event is not None:
            group.poll(self._event.query)
        return self._tensor


_WIDTH = 16  # the same on every rank, whatever its inputs: the first exchange of a call cannot fail on a difference


class InputCheck:
    """The digests of one call's inputs on all ranks: first of the text that describes them, then of each tensor."""

    def __init__(self, group: SequenceGroup, call: int, inputs: Mapping[str, torch.Tensor], described: str) -> None:
        self._group, self._call, self._names = group, call, tuple(inputs)[: _WIDTH - 1]
        device = next(iter(inputs.values())).device
        mine = torch.zeros(_WIDTH, dtype=torch.int64, device=device)
        mine[0].fill_(int.from_bytes(hashlib.sha256(described.encode()).digest()[:8], "big", signed=True))
        for place, name in zip(mine[1:], self._names):
            place.copy_(digest_on_device(inputs[name]))
        self._table = mine.new_empty((group.size, _WIDTH))
        self._pending = group.start_gather(mine[None], (1,) * group.size, self._table)
        self._copy: HostCopy | None = None

    def arrive(self) -> None:
        """Order the copy to the host after the exchange; called once other work is on its way."""
        self._pending.wait()
        self._copy = HostCopy(self._table)

    def verify(self) -> None:
        """Raise if the inputs differ.

        Raises:
            RankDisagreement: on every rank of the group, the same table.
        """
        assert self._copy is not None
        table = self._copy.read(self._group).tolist()
        if len({row[0] for row in table}) > 1:
            self._group.poll(lambda: False)  # until the watch has all descriptions and raises them as a table
        different = [name for i, name in enumerate(self._names, 1) if len({row[i] for row in table}) > 1]
        if not different:
            return
        lines = [
            f"  rank {rank}: "
            + ", ".join(f"{n} {d & 0xFFFFFFFF:08x}" for n, d in zip(self._names, row[1:]) if n in different)
            for rank, row in zip(self._group.ranks, table, strict=True)
        ]
        found = f"The ranks were called with different {' and '.join(different)} in call {self._call}:\n" + "\n".join(
            lines
        )
        self._group.watch.fail("different", found)
        raise disagreement("different", found)


_LOSS_WITHIN = 1e-4  # relative: kernels may round differently on each rank


class LossCheck:
    """The loss of one backward on all ranks."""

    def __init__(self, group: SequenceGroup, loss: torch.Tensor) -> None:
        self._group = group
        self._within = max(_LOSS_WITHIN, 2 * torch.finfo(loss.dtype).eps)
        mine = loss.sum(dtype=torch.float64).view(1)
        self._copy = HostCopy(group.gather(mine, (1,) * group.size))

    def verify(self) -> None:
        """Raise if the losses differ.

        Raises:
            RankDisagreement: on every rank of the group, the same table.
        """
        losses = self._copy.read(self._group)
        if torch.allclose(losses, losses[:1], rtol=self._within, atol=0.0, equal_nan=True):
            return
        lines = [f"  rank {rank}: {loss:.9g}" for rank, loss in zip(self._group.ranks, losses.tolist(), strict=True)]
        found = "\n".join(["The ranks computed different losses:", *lines])
        self._group.watch.fail("loss", found)
        raise disagreement("loss", found)


class FiniteCheck:
    """Whether the gradient that enters the blocks from behind is finite; a NaN loss makes it NaN."""

    def __init__(self, group: SequenceGroup, gradient: torch.Tensor) -> None:
        self._group = group
        self._copy = HostCopy(gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32)).isfinite())

    def verify(self) -> None:
        """Raise if it is not.

        Raises:
            RanksFailed: it holds NaN or infinity.
        """
        if not self._copy.read(self._group):
            self._group.watch.fail("error", "the loss has a gradient that is NaN or infinite")
            raise self._group.watch.cause()
