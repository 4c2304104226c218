"""DiffSynth's own low-precision bases under a split: `--quant_options` and `--fp8_models`.

`--fp8_models` wraps the layers of a model; each wrapper knows four devices and casts its weights on them in
every forward. Under a split all four are the device of the wrapper's stage. `--quant_options` puts another kind
of Linear in; its weights move as any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffsynth import fp8_lora, vram
from wanshim.core.model_split.quantize import quantized_names
from wanshim.errors import FeatureUnavailable

if TYPE_CHECKING:
    import torch

    from wanshim.core.model_split import SplitHandle
    from wanshim.undo import Undo

DEVICES = ("offload_device", "onload_device", "preparing_device", "computation_device")
_ASKED = "_wanshim_vram_config"  # on a managed model that was held back on the host: what it was to get

# torchao's configurations through which gradients reach LoRA and whose weights move as one tensor
TRAINABLE_CONFIGS = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "NVFP4WeightOnlyConfig")
BACKEND_REFUSALS = {
    "bitsandbytes": "packs its weights by CUDA kernels when they first move, and has not been proven exact when split",
    "comfy_kitchen": "computes in its own CUDA kernels, and has not been proven exact when split",
    "entropack": "decompresses by its own CUDA kernels, and has not been proven exact when split",
}


def refusal(dit: torch.nn.Module) -> str | None:
    """Why a DiT with this low-precision base is not split, or None."""
    devices = {str(vars(wrapper).get(name)) for wrapper in vram.wrappers(dit) for name in DEVICES}
    if "disk" in devices:
        return "--offload_models: DiffSynth reads its weights from disk in every forward, and no LoRA trains on them"
    return options_refusal(getattr(dit, "quantize_config", None))


def options_refusal(quantize: object) -> str | None:
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


def refuse_safetensors(accelerator: Any, model: torch.nn.Module, base: str, undo: Undo) -> None:
    """Until `undo` ends, what a script saves by accelerate as safetensors, which hold no weight in eight bits, is
    refused: accelerate would end in an error of torch's about storages, with half of the state written. Hooks before
    `save_state` may leave weights out, so a script that has some decides for itself."""

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def save(*args: object, **kwargs: object) -> Any:
            if original.__name__ == "save_state" and accelerator._save_model_state_pre_hook:
                return original(*args, **kwargs)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)  # whose own error it is
            bound.apply_defaults()
            saved = bound.arguments.get("model", model)
            if bound.arguments.get("safe_serialization", False) and quantized_names(saved, trained=False):
                raise FeatureUnavailable(
                    f"accelerator.{original.__name__} writes safetensors, which hold no weights of WANSHIM_BASE={base}",
                    hint="Pass safe_serialization=False, set WANSHIM_RESUME=auto in its place, or unset WANSHIM_BASE",
                )
            return original(*args, **kwargs)

        return save

    for name in ("save_state", "save_model"):
        undo.replace(accelerator, name, refusing)


def load_on_host(vram_config: Mapping[str, Any]) -> dict[str, Any]:
    """The same loading, with the host in place of every device but the disk."""
    managed = vram_config["offload_dtype"] is not None
    names = DEVICES if managed else ("computation_device",)
    return {**vram_config, **{name: "cpu" for name in names if vram_config[name] != "disk"}}


def remember(model: torch.nn.Module, vram_config: Mapping[str, Any]) -> None:
    """Keep what a managed model was to get, in case it is not split after all."""
    if vram.is_managed(model):
        vars(model)[_ASKED] = {name: vram_config[name] for name in DEVICES}


def place_as_asked(model: torch.nn.Module, device: torch.device | str) -> None:
    """A model that was held back on the host and is not split goes where it would have been."""
    if not vram.is_managed(model):
        model.to(device)
        return
    asked = vars(model).pop(_ASKED, None)
    if asked is None or "disk" in asked.values():
        return
    for wrapper in vram.wrappers(model):
        vars(wrapper).update(asked)
    model.to(asked["offload_device"])


def place_wrappers(handle: SplitHandle) -> int:
    """Give each wrapper the device of its stage in all its states, and its copies what trains; the number of
    wrappers."""
    count = 0
    for module, device in handle.placed:
        if vram.is_wrapper(module):
            places: dict[str, Any] = {**dict.fromkeys(DEVICES, device), "computation_device_type": device.type}
            handle.undo.set(module, {name: place for name, place in places.items() if name in vars(module)})
            handle.undo.set(module, dict(_sharing_what_trains(module)))
            count += 1
    return count


def share_in_copies(model: torch.nn.Module, undo: Undo) -> None:
    """Have wrappers share, in the copies of their blocks, all modules that need no cast, until `undo` ends."""
    for wrapper in vram.wrappers(model):
        undo.set(wrapper, dict(_sharing_what_trains(wrapper)))


def _sharing_what_trains(wrapper: object) -> Iterator[tuple[str, Any]]:
    """The work of `diffsynth.fp8_lora` for one wrapper, where that feature is off."""

    def is_wrappers_own(name: str) -> bool:
        method = getattr(type(wrapper), name, None)
        return method is not None and not hasattr(method, "__wrapped__")

    if type(wrapper).__name__ == "AutoWrappedModule" and is_wrappers_own("cast_to"):
        yield "cast_to", fp8_lora.cast_sharing_what_trains
    if is_wrappers_own("_copy_with_shared_children"):
        yield "_copy_with_shared_children", fp8_lora.copy_of_what_is_cast
