"""The worker's side: holds copies of modules and computes calls until the process that started it is gone.

Importing this module imports no torch: the worker shows that it lives while it does so.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from wanshim.core.shared.text import named_line

from .link import Link, LinkLost
from .process import become_worker

if TYPE_CHECKING:
    import torch
    from torch import nn

    from wanshim.core.streaming import HostCopy
    from wanshim.undo import Undo

    from .packing import Packed, Placed

_BEAT_SECONDS = 0.5


def main(end: int) -> None:
    """The whole life of a worker. `end`: descriptor of its end of the link."""
    become_worker()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches both: the parent decides
    link, busy = Link(socket.socket(fileno=end)), threading.Event()
    busy.set()
    threading.Thread(target=_beat, args=(link, busy), daemon=True).start()
    status = 1
    try:
        _Server(link, busy).run()
    except BaseException as error:
        if isinstance(error, LinkLost) and error.is_gone:
            status = 0
        else:  # the process that started this one sees no more than its end
            traceback.print_exc()
    finally:
        os._exit(status)  # nothing of the user's is to run at the end of a copy


def _beat(link: Link, busy: threading.Event) -> None:
    while True:
        if busy.is_set():
            try:
                link.beat()
            except LinkLost:
                os._exit(0)
        time.sleep(_BEAT_SECONDS)


class _Server:
    def __init__(self, link: Link, busy: threading.Event) -> None:
        self._link, self._busy = link, busy
        self._modules: dict[int, nn.Module] = {}
        self._packed: dict[int, tuple[Packed, Sequence[int]]] = {}  # with the numbers of their tensors
        self._tensors: dict[int, torch.Tensor] = {}  # by number
        self._hosts: WeakValueDictionary[int, HostCopy] = WeakValueDictionary()  # by number in the other process
        self._streams: dict[int, tuple[HostCopy, Undo]] = {}  # by module, whose blocks wait in host memory
        self._comes: HostCopy | None = None  # no module of which is held yet

    def run(self) -> None:
        while True:
            name, *arguments = self._link.receive()
            self._busy.set()
            try:
                reply, tensors = getattr(self, name)(*arguments)
            except LinkLost:
                raise
            except BaseException as error:
                reply, tensors = ("failed", named_line(error), traceback.format_exc()), []
            if reply is not None:
                self._link.send(reply)
            if tensors:
                self._mover.send(tensors, {0: self._link})
            self._busy.clear()

    # The calls. Each returns the reply, or None, and the tensors that follow it.

    def load(self, environment: Mapping[str, str], prepare: str, imports: Sequence[str]) -> Any:
        variables = os.environ  # noqa: TID251 - as they are in the process that started this one by now
        for name in variables.keys() - environment.keys():
            del variables[name]
        variables.update(environment)
        importlib.import_module("torch")
        if prepare:
            module, _, function = prepare.partition(":")
            getattr(importlib.import_module(module), function)()
        for module in imports:
            with contextlib.suppress(Exception):  # what is held names what it needs
                importlib.import_module(module)
        return None, []

    def start(self, device: str) -> Any:
        """Use the device: before, this process has nothing on it, which is what a plan counts on."""
        import torch

        from .mover import Mover

        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._mover = Mover(self._device)
        return ("ready",), []

    def connect(self, file: int, rank: int, size: int, patience: float) -> Any:
        from .mover import Mover

        self._mover = Mover.over_nccl(self._device, file, rank, size, patience)
        return ("ready",), []

    def share(self, number: int, bounds: tuple[tuple[int, int], ...]) -> Any:
        """Map the host memory whose descriptors come next, once, and lock its pages while weights come into it."""
        from wanshim.core.streaming import HostCopy
        from wanshim.core.streaming.host_copy import num_files

        descriptors = [self._link.receive_descriptor() for _ in range(num_files(bounds))]
        self._comes = self._hosts.get(number)
        if self._comes is None:
            self._comes = self._hosts[number] = HostCopy.in_files(descriptors, bounds)
            self._comes.lock(self._device)
        else:
            for descriptor in descriptors:
                os.close(descriptor)
        return None, []

    def hold(
        self,
        key: int,
        packed: Packed,
        numbers: Sequence[int],
        new: Sequence[int],
        dropped: Sequence[int],
        set_up: Any,
        host: Placed | None,
    ) -> Any:
        """Hold a module: its tensors by number, of which the `new` places are received, or lie in the host's memory."""
        copy = None if host is None else self._hosts[host.number]  # it outlives the stream that ends here
        self._drop((key,), dropped)
        offsets = {} if host is None else host.offsets
        self._tensors |= {numbers[at]: packed.specs[at].empty(self._device) for at in new if at not in offsets}
        if copy is not None:
            self._tensors |= {numbers[at]: packed.specs[at].in_memory(copy, place) for at, place in offsets.items()}
        self._unpacked(packed, numbers)  # if it cannot be, nothing is sent
        self._link.send(("ready",))
        self._mover.receive((self._tensors[numbers[at]] for at in new if at not in offsets), self._link, 0)
        self._synchronize()
        self._packed[key] = packed, numbers
        self._make(key, copy, set_up)
        return ("held",), []

    def renew(self, key: int, set_up: Any) -> Any:
        """Make a held module again, of the same tensors. It replies only where that fails."""
        self._make(key, self._end_stream(key), set_up)
        return None, []

    def _make(self, key: int, copy: HostCopy | None, set_up: Any) -> None:
        """Make a module of its tensors, which are here."""
        self._comes = None
        module = self._modules[key] = self._unpacked(*self._packed[key])
        if copy is not None:
            from wanshim.core.streaming import compute_from

            self._streams[key] = copy, compute_from(copy, module, self._device)
        if set_up is not None:
            set_up(module)

    def _end_stream(self, key: int) -> HostCopy | None:
        copy, attached = self._streams.pop(key, (None, None))
        if attached is not None:
            attached.remove()
        return copy

    def drop(self, keys: Sequence[int], dropped: Sequence[int]) -> Any:
        """Free modules that the other process holds no more, and the memory of their tensors."""
        self._comes = None
        self._drop(keys, dropped)
        gc.collect()
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        return None, []

    def _drop(self, keys: Sequence[int], dropped: Sequence[int]) -> None:
        for key in keys:
            self._end_stream(key)
            self._modules.pop(key, None)
            self._packed.pop(key, None)
        for number in dropped:
            del self._tensors[number]

    def _unpacked(self, packed: Packed, numbers: Sequence[int]) -> Any:
        from .packing import unpack

        held = [self._tensors[number] for number in numbers]
        # A forward may write the others, as peft does the scale of a LoRA: each module has its own.
        return unpack(packed, [t if s.is_weight else s.copy(t) for t, s in zip(held, packed.specs, strict=True)])

    def call(self, settings: dict[str, Any], packed: Packed) -> Any:
        from . import numerics
        from .packing import pack, unpack

        tensors = [spec.empty(self._device) for spec in packed.specs]
        self._mover.receive(tensors, self._link, 0)
        with numerics.apply(settings):
            function, args, kwargs = unpack(packed, tensors, self._modules)
            result, tensors = pack(function(*args, **kwargs), self._device)
        self._synchronize()
        return ("done", result), tensors

    def _synchronize(self) -> None:
        """An error of a kernel belongs to the call that started it, and who waits for a reply waits no longer."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
