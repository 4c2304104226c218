"""A pipeline whose script loads its models to a GPU without room for all of them.

DiffSynth raises, and its user gives each `ModelConfig` the places of a low-VRAM example. Here the models are loaded
once more with those, and the DiT is streamed as that of any other script with a `vram_config`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LEFT_GIB = 2.0  # of a GPU, free of weights, as in DiffSynth's low-VRAM examples


def load_where_there_is_room(load: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, str]:
    """The models that `BasePipeline.download_and_load_models` loads, kept in host memory if the GPU has no room.

    Returns:
        The models, and what to tell of it; empty: they are where the script wants them.

    Raises:
        torch.OutOfMemoryError: the script has places for all its models, or they cannot be kept there.
    """
    import torch

    try:
        return load(pipe, *args, **kwargs), ""
    except torch.OutOfMemoryError as error:
        failed = error.with_traceback(None)  # its frames hold the models that were loaded
    device = torch.device(pipe.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        given = inspect.signature(load).bind(pipe, *args, **kwargs)
        given.apply_defaults()
        configs = given.arguments["model_configs"]
        placed = [_on_host(config, pipe.torch_dtype, device) for config in configs]
        if placed == configs:
            raise ValueError("each of its models has places of the script's own")
        limit = given.arguments["vram_limit"]
        if limit is None and device.type == "cuda":
            limit = torch.cuda.get_device_properties(device).total_memory / 2**30 - _LEFT_GIB
        given.arguments.update(model_configs=placed, vram_limit=limit)
        loaded = load(*given.args, **given.kwargs)
    except Exception as reason:
        raise failed from reason
    return loaded, (
        f"{type(pipe).__name__} has no room on {device} as a whole: its models are loaded into host memory, as with "
        'offload_device="cpu" in each ModelConfig'
    )


def _on_host(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A `ModelConfig` with the places of a low-VRAM example; the script's own, if it has some or is quantized."""
    are_own = config.offload_device is not None and config.offload_dtype is not None  # DiffSynth passes over one alone
    if are_own or getattr(config, "quantize", None):
        return config
    dtype, device = config.computation_dtype or dtype, config.computation_device or device
    return dataclasses.replace(
        config,
        offload_dtype=dtype,
        offload_device="cpu",
        onload_dtype=dtype,
        onload_device="cpu",
        preparing_dtype=dtype,
        preparing_device=device,
        computation_dtype=dtype,
        computation_device=device,
    )
