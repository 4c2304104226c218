"""Saved tensors through host memory, in place of `torch.autograd.graph.save_on_cpu`.

What `save_on_cpu` does to a checkpointed block list: every block's inputs go to pageable memory with the host
waiting, and the inputs that all blocks share (`freqs`, `context`, `t_mod` of a video DiT) go there once for
each block. Here a tensor travels through page-locked memory on a side stream, comes back one block before
it is needed, and one that several blocks save stays where it is.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from wanshim.core.offload.channel import Arrival, Channel, Transfer
from wanshim.core.shared.forks import Owner
from wanshim.core.shared.host_memory import HostPool, is_dense
from wanshim.errors import WanshimError

MIN_BYTES = 2**20  # below this a tensor is not worth a copy


@dataclass
class OffloadCount:
    """Counts since the offload was made. Bytes are those that travelled to the host."""

    sent: int = 0
    sent_bytes: int = 0
    shared: int = 0  # saved again by another block: not copied again
    ahead: int = 0  # came back before it was asked for
    on_demand: int = 0
    stayed: int = 0  # asked for while still on the device


class Saved:
    """The object that autograd holds in place of a tensor. Dies with the last graph that holds it."""

    def __init__(self, offload: CheckpointOffload, tensor: torch.Tensor, channel: Channel) -> None:
        self.offload = offload
        self.channel = channel
        self.version = tensor._version
        self.shape = tuple(tensor.shape)
        self.resident: torch.Tensor | None = None
        self.transfer: Transfer | None = None
        self.arrival: Arrival | None = None
        self.previous: ref[Saved] | None = None  # saved before this one: needed after it

    def __del__(self) -> None:
        # May run anywhere, in any thread: what is to be done about it is done by the next call that holds
        # the lock.
        if self.transfer is not None:
            self.offload._dead.append((self.channel, self.transfer, self.arrival))


class CheckpointOffload:
    """Keeps buffers and streams from step to step. `with offload.saving():` around a checkpointed block.

    Gradients are those of `save_on_cpu` and of no offload, bit for bit. Safe to use from several threads;
    never synchronises host and device. A device's tensors come back to it. On a host without GPUs
    the buffers are plain memory.

    Args:
        min_bytes: smaller tensors stay on the device.
    """

    def __init__(self, *, min_bytes: int = MIN_BYTES) -> None:
        self.min_bytes = min_bytes
        self.count = OffloadCount()
        self._pools = {"cuda": HostPool(locked=True), "cpu": HostPool(locked=False)}
        self._channels: dict[torch.device, Channel] = {}
        self._known: WeakValueDictionary[tuple[Any, ...], Saved] = WeakValueDictionary()
        self._threads = threading.local()  # chain: of each device, what this thread saved last
        self._dead: deque[tuple[Channel, Transfer, Arrival | None]] = deque()
        self._lock = threading.RLock()
        self._owner = Owner("checkpoint offload")

    @property
    def host_bytes(self) -> int:
        """Host memory held, in use or not."""
        return sum(pool.num_bytes for pool in self._pools.values())

    def saving(self) -> saved_tensors_hooks:
        """A context manager: tensors that autograd saves inside it go through the host."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def clear(self) -> None:
        """Let go of the buffers that no graph uses."""
        with self._lock:
            self._bury()
            for pool in self._pools.values():
                pool.clear()

    def pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        """Send a tensor to the host; what `unpack` takes in its place. One that is not worth it stays as it is."""
        self._owner.check()
        if not self._worth_it(tensor):
            return tensor
        with self._lock:
            self._bury()
            key = _key(tensor)
            known = self._known.get(key)
            if known is not None:
                self._keep(known, tensor)
                return known
            channel = self._channel(tensor.device)
            saved = Saved(self, tensor, channel)
            dense = tensor if is_dense(tensor) else tensor.contiguous()
            saved.transfer = channel.send(dense, self._pools[tensor.device.type].take(dense.nbytes))
            self.count.sent += 1
            self.count.sent_bytes += dense.nbytes
            self._known[key] = saved
            chain: dict[torch.device, ref[Saved]] = self._threads.__dict__.setdefault("chain", {})
            saved.previous, chain[tensor.device] = chain.get(tensor.device), ref(saved)
            return saved

    def unpack(self, saved: Saved | torch.Tensor) -> torch.Tensor:
        """The tensor, on its device. The one packed before it begins its way back."""
        if isinstance(saved, torch.Tensor):
            return saved
        with self._lock:
            self._bury()
            tensor = self._back(saved)
            self._fetch_ahead(saved)
            return tensor

    # --- under the lock

    def _worth_it(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        return plain and tensor.device.type in self._pools and tensor.nbytes >= max(1, self.min_bytes)

    def _channel(self, device: torch.device) -> Channel:
        if device not in self._channels:
            self._channels[device] = Channel(device)
        return self._channels[device]

    def _keep(self, saved: Saved, tensor: torch.Tensor) -> None:
        """It is shared: one tensor on the device instead of a copy for each who saves it."""
        self.count.shared += 1
        if saved.resident is None:
            saved.resident = tensor
            if saved.transfer is not None:
                self._release(saved.channel, saved.transfer, saved.arrival)
                saved.transfer = saved.arrival = None

    def _back(self, saved: Saved) -> torch.Tensor:
        if saved.resident is not None:
            if saved.resident._version != saved.version:
                raise _written(saved)
            return saved.resident
        transfer = saved.transfer
        assert transfer is not None
        if transfer.source is not None:
            self.count.stayed += 1
            if transfer.source._version == transfer.version:
                return transfer.source
            if transfer.stream is None:  # the copy was whole at once
                return saved.channel.fetch(transfer).tensor
            raise _written(saved)
        if transfer.spoilt:
            raise _written(saved)
        if saved.arrival is None:
            self.count.on_demand += 1
            saved.arrival = saved.channel.fetch(transfer)
        else:
            self.count.ahead += 1
        tensor = saved.channel.receive(saved.arrival)
        saved.arrival = None  # a second backward fetches it again
        return tensor

    def _fetch_ahead(self, saved: Saved) -> None:
        before = None if saved.previous is None else saved.previous()
        while before is not None and before.resident is not None:
            before = None if before.previous is None else before.previous()
        if before is None or before.transfer is None or before.transfer.source is not None:
            return
        if before.arrival is None and not before.transfer.spoilt:
            before.arrival = before.channel.fetch(before.transfer)

    def _bury(self) -> None:
        while self._dead:
            self._release(*self._dead.popleft())

    def _release(self, channel: Channel, transfer: Transfer, arrival: Arrival | None) -> None:
        channel.release_source(transfer)
        if arrival is not None:
            channel.drop(arrival)
        self._pools[channel.device.type].give(transfer.buffer)


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = StorageWeakRef(tensor.untyped_storage())  # while it is held, no other storage gets its address
    return storage, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _written(saved: Saved) -> WanshimError:
    return WanshimError(
        f"a tensor of shape {saved.shape} on {saved.channel.device} was written to after a checkpointed block had "
        "saved it for its backward",
        expected="blocks that leave their inputs as they are",
        hint="Clone it before it is changed, or switch the feature off and use save_on_cpu",
    )
