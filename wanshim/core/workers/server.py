"""The worker's side: holds copies of modules and computes calls until the process that started it is gone.

Importing this module imports no torch: the worker shows that it lives while it does so.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .link import Link, LinkLost

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .packing import Packed

_BEAT_SECONDS = 0.5


def main(end: int) -> None:
    """The whole life of a worker. `end`: descriptor of its end of the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches both: the parent decides
    link, busy = Link(socket.socket(fileno=end)), threading.Event()
    busy.set()
    threading.Thread(target=_beat, args=(link, busy), daemon=True).start()
    try:
        _Server(link, busy).run()
    except LinkLost:
        pass
    finally:
        os._exit(0)  # nothing of the user's is to run at the end of a copy


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
        self._modules: dict[str, nn.Module] = {}
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._packed: dict[str, Packed] = {}

    def run(self) -> None:
        while True:
            name, *arguments = self._link.receive()
            self._busy.set()
            try:
                reply, tensors = getattr(self, name)(*arguments)
            except LinkLost:
                raise
            except BaseException as error:
                reply, tensors = ("failed", _described(error), traceback.format_exc()), []
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

    def hold(self, name: str, packed: Packed, sources: Sequence[int | None]) -> Any:
        """Hold a module: of its tensors, those with a source are held already, under that number."""
        from .packing import unpack

        before = self._tensors.pop(name, [])
        self._modules.pop(name, None)
        kept = {at: before[source] for at, source in enumerate(sources) if source is not None}
        del before
        tensors = [kept[at] if at in kept else spec.empty(self._device) for at, spec in enumerate(packed.specs)]
        module = unpack(packed, tensors)
        self._link.send(("ready",))
        self._mover.receive((t for at, t in enumerate(tensors) if at not in kept), self._link, 0)
        self._synchronize()
        self._modules[name], self._tensors[name], self._packed[name] = module, tensors, packed
        return ("held",), []

    def renew(self, name: str) -> Any:
        """Make a held module again, of the same tensors. It replies only where that fails."""
        from .packing import unpack

        self._modules[name] = unpack(self._packed[name], self._tensors[name])
        return None, []

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


def _described(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"
