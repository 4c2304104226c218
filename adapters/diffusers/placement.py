"""A pipeline on a GPU without room for all of its models, or for a step beside them.

diffusers raises, and its user puts `enable_model_cpu_offload()` in the place of `to("cuda")`. Here that is done for
them, and the transformers of such a pipeline are streamed as those of any other that is offloaded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanshim.patching import Kind, Seam, SeamState
from wanshim.patching.vae_method import is_a_rank

if TYPE_CHECKING:
    import torch


_OFFLOADED = "each of its models comes there while it computes, as by enable_model_cpu_offload()"


def moving_seam(is_served: Callable[[type], bool]) -> Seam:
    """The seam of a pipeline's `to`.

    Args:
        is_served: whether pipelines of a class are.
    """
    return Seam(
        "diffusers.pipelines.pipeline_utils:DiffusionPipeline.to",
        functools.partial(_make, is_served),
        kind=Kind.WRAPT,
        passes_through=True,
        required=False,
        why="a script that moves its whole pipeline to a GPU ends with OutOfMemoryError, though each of its models has "
        "room",
        upstream="https://github.com/huggingface/diffusers (its pages name enable_model_cpu_offload for it)",
        remove_when="diffusers offloads what has no room by itself",
    )


def _make(is_served: Callable[[type], bool], original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if seam.off or seam.settings.generate is None or not is_served(type(self)) or is_a_rank():
            return original(self, *args, **kwargs)
        import torch

        try:
            return original(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            try:
                device = _offload(original, self, *args, **kwargs)
            except Exception as reason:
                raise error from reason
        seam.notes.append(f"{type(self).__name__} has no room on {device} as a whole: {_OFFLOADED}")
        return self

    return to


def call_with_room(
    call: Callable[[], Any], seam: SeamState, original: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """One call of a pipeline, which begins again with its models offloaded if there is no room for its first step.

    Args:
        call: makes it, and has counted it in `seam`.
        original: the pipeline's own, with these arguments.
    """
    import torch

    from wanshim.core.sequence.random_state import random_states, set_random_states

    if seam.settings.generate is None or is_a_rank() or (device := _device_of_all(pipe)) is None:
        return call()
    given = inspect.signature(original).bind(pipe, *args, **kwargs).arguments.get("generator")
    some = given if isinstance(given, list | tuple) else [given]
    generators = [each for each in some if isinstance(each, torch.Generator)]
    drawn, states = [each.get_state() for each in generators], random_states(device)
    try:
        return call()
    except torch.OutOfMemoryError as error:
        steps = getattr(getattr(pipe, "scheduler", None), "step_index", 1)
        if steps not in (None, 0):  # a callback of the program's has seen one
            raise
        failed = error.with_traceback(None)  # its frames hold what the step has computed
    try:
        pipe.enable_model_cpu_offload(device=device)
    except Exception as reason:
        raise failed from reason
    for each, state in zip(generators, drawn, strict=True):
        each.set_state(state)
    set_random_states(states, device)
    seam.notes.append(f"{type(pipe).__name__} has no room on {device} for a step, and begins again: {_OFFLOADED}")
    seam.enter()
    return call()


def _device_of_all(pipe: Any) -> torch.device | None:
    """The device of all its models; None: there are several, or some are offloaded."""
    import torch

    from wanshim.adapters.diffusers import offload

    models = [each for each in pipe.components.values() if isinstance(each, torch.nn.Module)]
    devices = {tensor.device for model in models for tensor in model.parameters()}
    return None if len(devices) != 1 or any(map(offload.is_offloaded, models)) else devices.pop()


def _offload(to: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> torch.device:
    """Bring a pipeline that is in part on a device back to the host, in the dtype that was asked for, and offload it.

    Returns:
        The device on which its models compute.
    """
    import torch

    from wanshim.core.shared.gpu_memory import indexed

    named = {name: kwargs[name] for name in ("device", "dtype") if name in kwargs}
    device, dtype, *_ = torch._C._nn._parse_to(*args, **named)
    on = indexed(device)
    to(pipe, device="cpu", dtype=dtype, silence_dtype_warnings=True)
    pipe.enable_model_cpu_offload(device=on)
    return on
