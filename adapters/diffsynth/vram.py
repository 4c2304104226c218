"""DiffSynth's VRAM management of a model: whether it can be carried to other GPUs, and the model without it.

It has a wrapper around each layer, which brings weights to the GPU in each forward and converts them where the script's
`vram_config` says so. A model without those wrappers computes the same bits as long as nothing is converted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.core.generation import Offload

_DISK = "disk"  # in place of a device and a dtype: weights are read from their files where they are needed
_PLAIN: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by wrapper of a linear layer: the layer


def is_managed(model: Any) -> bool:
    return bool(getattr(model, "vram_management_enabled", False))


def computing_device(pipe: Any, models: dict[str, Any]) -> torch.device | None:
    """The device on which managed models compute; None: none of these models is managed."""
    import torch

    from wanshim.core.shared.gpu_memory import indexed

    return indexed(torch.device(pipe.device)) if any(map(is_managed, models.values())) else None


def replaceable(pipe: Any, models: dict[str, Any]) -> Offload | None:
    """The management, in place of which this process can stream the models; None: their weights are all on the GPU."""
    import torch

    from wanshim.core.generation import Offload

    found = [each for model in models.values() for each in wrappers(model)]
    if not found or any(str(each.onload_device) not in ("cpu", _DISK) for each in found):
        return None
    from_files = any(getattr(each, "disk_offload", False) for each in found)
    limits = {id(model): _limit(model) for model in models.values()}  # while a model is streamed it has no wrappers

    def room(model: Any) -> float:
        free, total = torch.cuda.mem_get_info(found[0].computation_device)
        return limits.get(id(model), 0) * 2**30 - (total - free)

    ends = ((pipe, "load_models_to_device"),)
    return Offload(before=_before, ends=ends, keeps=not from_files, room=room)


def why_not_carried(model: Any) -> str:
    """A phrase of which the model is the subject; empty if a copy without its management computes the same bits."""
    if is_managed(model) and is_wrapper(model):
        return "is under VRAM management as a whole"
    for each in wrappers(model):
        dtypes = {each.onload_dtype, each.preparing_dtype, each.computation_dtype} - {_DISK}
        if len(dtypes) > 1:
            return f"is under VRAM management that converts its weights ({', '.join(sorted(map(str, dtypes)))})"
        if getattr(each, "enable_fp8", False):
            return "is under VRAM management and computes in float8"
        if getattr(each, "lora_merger", None) is not None:
            return "has LoRAs under VRAM management that are merged"
        if "module" in each._modules and getattr(each, "lora_A_weights", None):
            return "has LoRAs under VRAM management beside quantized weights"
        if not {str(each.onload_device), str(each.preparing_device)} <= {"cpu", _DISK, str(each.computation_device)}:
            return f"is under VRAM management that has its weights on {each.onload_device} and {each.preparing_device}"
    return ""


@contextlib.contextmanager
def without_management(model: Any) -> Iterator[None]:
    """The model as its classes made it, its weights where the management has them."""
    with Undo() as undo:
        for parent in list(model.modules()) if is_managed(model) else ():
            for name, child in list(parent._modules.items()):
                if child is not None and is_wrapper(child):
                    parent._modules[name] = _inside(child)
                    undo.add(partial(parent._modules.__setitem__, name, child))
        yield


def _limit(model: Any) -> float:
    """GiB of its device that may be in use while layers of a model are prepared there, where they then stay: without
    a limit all, and 0 if they are prepared elsewhere."""
    layers = wrappers(model)
    if not layers or any(str(each.preparing_device) != str(each.computation_device) for each in layers):
        return 0
    return min((each.vram_limit for each in layers if each.vram_limit is not None), default=float("inf"))


def _before(model: Any) -> Callable[[Sequence[torch.Tensor]], None] | None:
    """Weights that an earlier forward has left on the GPU go back to the host, and those in files come there.

    Raises:
        HostMemoryInvalid: the host has not that much memory.
    """
    from wanshim.core.shared.host_memory import room_for

    if not is_managed(model):
        return None
    managed = wrappers(model)
    for each in managed:
        if each.state == 2:  # prepared
            each.to(device="cpu")
            each.state = 1
    if waiting := [each for each in managed if any(weight.is_meta for weight in each.parameters())]:
        dtype = waiting[0].computation_dtype
        size = sum(weight.numel() for weight in model.parameters() if weight.is_meta) * dtype.itemsize
        with room_for(size, f"the weights of {type(model).__name__}, which its files have"):
            for each in waiting:
                if "quantize" in vars(each):  # a wrapper has its module's attributes, too
                    each._load_from_disk("cpu")
                else:
                    each.load_from_disk(dtype, "cpu")
    return lambda weights: None


def wrappers(model: Any) -> list[Any]:
    """The wrappers around the layers of a model; none if it is not managed."""
    return list(filter(is_wrapper, model.modules())) if is_managed(model) else []


def is_wrapper(module: Any) -> bool:
    from diffsynth.core.vram.layers import AutoTorchModule

    return isinstance(module, AutoTorchModule)


def _inside(wrapper: Any) -> Any:
    """The wrapped module, or the linear layer of these weights, whose place the wrapper takes."""
    import torch

    from wanshim.adapters.diffsynth.lora_linear import LoraLinear

    if "module" in wrapper._modules:
        return wrapper.module
    kind = LoraLinear if wrapper.lora_A_weights else torch.nn.Linear
    if type(_PLAIN.get(wrapper)) is not kind:
        sizes = wrapper.in_features, wrapper.out_features
        _PLAIN[wrapper] = kind(*sizes, bias=wrapper.bias is not None, device="meta")
    layer = _PLAIN[wrapper]
    layer._parameters = wrapper._parameters
    if wrapper.lora_A_weights:
        layer.set_loras(wrapper.lora_A_weights, wrapper.lora_B_weights)
    return layer.train(wrapper.training)
