"""Which devices a pipeline's forwards go over, and whether its models can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MethodType

import torch
from torch import nn

from wanshim.core.shared.plain import seen_by, why_not_plain
from wanshim.core.shared.weight_bytes import tensors
from wanshim.core.workers.packing import pack
from wanshim.errors import ModelInvalid, WorkersInvalid

from .binding import NotShared
from .job import Request
from .own_code import why_other_code


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """The one device of all parameters.

    Raises:
        NotShared: there are several.
    """
    found = {parameter.device for module in modules for parameter in module.parameters()}
    if len(found) != 1:
        names = ", ".join(sorted(map(str, found)))
        raise NotShared(f"its models are not on one device: {names or 'they have no parameters'}")
    return found.pop()


def check_plain(name: str, model: nn.Module, methods: Iterable[str] = ()) -> None:
    """Raise NotShared if a copy would not do as the original.

    Args:
        methods: of `model`, that its copy stands in for, beside its forward: then torch.compile must not have it.
    """

    def carried(part: nn.Module) -> bool:
        """As installed code binds a function to a part that it makes; `why_other_code` looks at whose it is."""
        bound = vars(part)["forward"]
        return part is not model and not methods and isinstance(bound, MethodType) and bound.__self__ is part

    if found := why_not_plain(model.modules(), carried, may_be_compiled=not methods):
        module, reason = found
        path = next((path for path, each in model.named_modules() if each is module), "")
        where = f"{name} ({path}) " if path else f"{name} " if module is not None else ""
        raise NotShared(f"{where}{reason}; a worker would compute without that")
    reason = why_other_code(model, methods)
    if reason:
        raise NotShared(f"{name}: {reason}, and a worker would not have that")


def check_around(device: torch.device) -> None:
    """Raise NotShared if something is on in this thread, now, that a worker would not have, or that changes the dtype
    of what it returns."""
    if torch.is_autocast_enabled(device.type):
        raise NotShared("torch.autocast is on, which changes the dtype of what its models return")
    if (seen := seen_by()) is not None:
        raise NotShared(f"{seen} is on, which would not see what a worker computes")


def check_copied(modules: Mapping[str, nn.Module], device: torch.device) -> None:
    """Raise NotShared if a worker cannot hold a copy of one of them. Those without weights yet are not looked at."""
    for name, module in modules.items():
        if any(tensor.is_meta for tensor in tensors(module)):
            continue
        try:
            pack(module, device)
        except WorkersInvalid as error:
            raise NotShared(f"{name}: {error}") from error


def choose_devices(own: torch.device, request: Request) -> tuple[torch.device, ...]:
    """The pipeline's own device and those of the workers.

    Raises:
        ModelInvalid: those that are named do not begin with the pipeline's own.
        NotShared: the program sees fewer than asked for, or the pipeline is on the CPU of a machine with GPUs.
    """
    if request.devices is not None:
        return _named(own, request.devices)
    if own.type != "cuda":
        if torch.cuda.is_available():
            raise NotShared(f"its models are on {own}; move the pipeline to a GPU first: pipe.to('cuda')")
        return (own,) * (request.gpus or 1)
    present = torch.cuda.device_count()
    if request.gpus is not None and request.gpus > present:
        raise NotShared(f"{request.gpus} GPUs were asked for, and the program sees {present}")
    others = [torch.device("cuda", index) for index in range(present) if index != own.index]
    return (own, *others[: (request.gpus or present) - 1])


def _named(own: torch.device, names: Sequence[str]) -> tuple[torch.device, ...]:
    devices = tuple(torch.device(name) for name in names)
    if not devices or devices[0] != own:
        raise ModelInvalid(
            f"a pipeline on {own} over {', '.join(names) or 'no device'}",
            expected="the pipeline's own device first",
            hint=f"Name {own} first, or move the pipeline",
        )
    return devices
