"""DiffSynth's own low-precision bases under a split: `--quant_options` and `--fp8_models`.

`--fp8_models` wraps the layers of a model; each wrapper knows four devices and casts its weights on them in
every forward. Under a split all four are the device of the wrapper's stage. `--quant_options` puts another kind
of Linear in; its weights move as any other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wanshim.core.placement import SplitHandle

DEVICES = ("offload_device", "onload_device", "preparing_device", "computation_device")
_ASKED = "_wanshim_vram_config"  # on a managed model that was held back on the host: what it was to get

# torchao's configurations through which gradients reach LoRA and whose weights move as one tensor
TRAINABLE_CONFIGS = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "NVFP4WeightOnlyConfig")
BACKEND_REFUSALS = {
    "bitsandbytes": "packs its weights by CUDA kernels when they first move, and has not been proven exact when split",
    "comfy_kitchen": "computes in its own CUDA kernels, and has not been proven exact when split",
    "entropack": "decompresses by its own CUDA kernels, and has not been proven exact when split",
}


def refusal(dit: Any) -> str | None:
    """Why a DiT with this low-precision base is not split, or None."""
    if "disk" in _wrapper_devices(dit):
        return "--offload_models: DiffSynth reads its weights from disk in every forward, and no LoRA trains on them"
    return options_refusal(getattr(dit, "quantize_config", None))


def options_refusal(quantize: Any) -> str | None:
    """Why a model quantised by this configuration of `--quant_options` is not split, or None."""
    for config in getattr(quantize, "configs", [quantize]):
        reason = _config_refusal(config)
        if reason is not None:
            return f"--quant_options {config.method}: {reason}"
    return None


def _config_refusal(config: Any) -> str | None:
    if config is None or config.mode == "dequant_once":  # nothing, or plain Linears
        return None
    backend = config.backend.name
    if backend != "torchao":
        return BACKEND_REFUSALS.get(backend, f"the backend {backend} is not known to work when split")
    kind = type(config.backend.config).__name__
    if kind not in TRAINABLE_CONFIGS:
        return f"{kind} quantises activations or packs its weights; weight-only ones are {', '.join(TRAINABLE_CONFIGS)}"
    return None


def load_on_host(vram_config: Mapping[str, Any]) -> dict[str, Any]:
    """The same loading, with the host in place of every device but the disk."""
    managed = vram_config["offload_dtype"] is not None
    names = DEVICES if managed else ("computation_device",)
    return {**vram_config, **{name: "cpu" for name in names if vram_config[name] != "disk"}}


def remember(model: Any, vram_config: Mapping[str, Any]) -> None:
    """Keep what a managed model was to get, in case it is not split after all."""
    if getattr(model, "vram_management_enabled", False):
        vars(model)[_ASKED] = {name: vram_config[name] for name in DEVICES}


def place_as_asked(model: Any, device: Any) -> None:
    """A model that was held back on the host and is not split goes where it would have been."""
    if not getattr(model, "vram_management_enabled", False):
        model.to(device)
        return
    asked = vars(model).pop(_ASKED, None)
    if asked is None or "disk" in asked.values():
        return
    for wrapper in _wrappers(model):
        vars(wrapper).update(asked)
    model.to(asked["offload_device"])


def place_wrappers(handle: SplitHandle) -> int:
    """Give each wrapper the device of its stage in all its states; the number of wrappers.

    Later releases copy a block with its wrappers shared, but LoRA layers with it: gradients would go to the
    copy. What trains is shared too.
    """
    wrapper_class = _wrapper_class()
    count = 0
    for module, device in handle.placed:
        if isinstance(module, wrapper_class):
            attributes: dict[str, Any] = dict.fromkeys(DEVICES, device)
            attributes["computation_device_type"] = device.type
            if hasattr(type(module), "_copy_with_shared_children"):
                attributes["_copy_with_shared_children"] = MethodType(_copy_sharing_what_trains, module)
            handle.set_attributes(module, {k: v for k, v in attributes.items() if k[0] == "_" or k in vars(module)})
            count += 1
    return count


def _copy_sharing_what_trains(self: Any, module: Any) -> tuple[Any, set[int]]:
    """As DiffSynth's own, with every module that holds trainable parameters shared beside the wrappers."""
    wrapper_class = _wrapper_class()
    shared = {
        id(child): child
        for child in module.modules()
        if child is not module
        and (isinstance(child, wrapper_class) or any(p.requires_grad for p in child.parameters(recurse=False)))
    }
    return copy.deepcopy(module, dict(shared)), set(shared)


def _wrapper_class() -> type[Any]:
    from diffsynth.core.vram.layers import AutoTorchModule

    return AutoTorchModule  # type: ignore[no-any-return]


def _wrappers(model: Any) -> list[Any]:
    if not getattr(model, "vram_management_enabled", False):
        return []
    return [module for module in model.modules() if isinstance(module, _wrapper_class())]


def _wrapper_devices(model: Any) -> set[str]:
    return {str(vars(wrapper).get(name)) for wrapper in _wrappers(model) for name in DEVICES}
