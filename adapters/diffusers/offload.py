"""A script's offload of a model, by diffusers or accelerate: whether it can be carried to other GPUs, and the model
without it. The hooks of an offload stay in the script's process. A hook that keeps nothing, as of layerwise casting, a
copy has anew."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from wanshim.adapters.diffusers import step_cache
from wanshim.undo import Undo

if TYPE_CHECKING:
    import torch

    from wanshim.core.generation import Offload

GROUPS = frozenset({"group_offloading", "lazy_prefetch_group_offloading", "layer_execution_tracker"})
_CARRIED = "_wanshim_hooks"  # of a module without hooks: those that its copy has
_OF_HOOKS = ("_hf_hook", "_old_forward", "_diffusers_hook", "forward")  # what hooks put on a module


def execution_device(pipe: Any, models: dict[str, Any]) -> torch.device | None:
    """The device on which a pipeline's offloaded models compute; None: none of these models is offloaded."""
    import torch

    from wanshim.core.shared.gpu_memory import indexed

    if not any(is_offloaded(model) for model in models.values()):
        return None
    device: torch.device = indexed(pipe._execution_device)
    return torch.device("cpu") if device.type == "cpu" else device


def is_offloaded(model: Any) -> bool:
    return any(hasattr(module, "_hf_hook") or GROUPS.intersection(_of_diffusers(module)) for module in model.modules())


def replaceable(pipe: Any, models: dict[str, Any]) -> Offload | None:
    """A pipeline's offload, in place of which this process can stream its models; None: it must stay. Other hooks are
    in the same registry, and a compiled model has hooks in its graphs."""
    from wanshim.core.generation import Offload
    from wanshim.core.shared.plain import is_compiled

    if not all(is_offloaded(model) for model in models.values()):
        return None
    if any(is_compiled(model) or any(map(_others, model.modules())) for model in models.values()):
        return None
    owners = (pipe, "maybe_free_model_hooks"), (getattr(pipe, "vae", None), "decode")
    ends = tuple((owner, name) for owner, name in owners if hasattr(owner, name))
    # By `enable_model_cpu_offload`. While a model is streamed it has no hooks.
    whole = [each for each in models.values() if any(type(h).__name__ == "CpuOffload" for h in _of_accelerate(each))]

    def room(model: Any) -> float:
        return float("inf") if any(model is each for each in whole) else 0

    return Offload(before=_before, ends=ends, room=room)


def _before(model: Any) -> Callable[[Sequence[torch.Tensor]], None]:
    """Have the model before this one leave the device, as `enable_model_cpu_offload` does; this one is not moved.

    Returns:
        A function that tells the hooks of the model, which may be off by then, where weights are now.
    """
    import torch

    groups, layers = [], []
    for module in model.modules():
        if group := getattr(_of_diffusers(module).get("group_offloading"), "group", None):
            groups.append(group)
        for hook in _of_accelerate(module):
            if type(hook).__name__ == "CpuOffload":
                # A layer would draw its weights from the program's generator.
                hook.pre_forward(torch.nn.ParameterList([torch.empty(0, device=hook.execution_device)]))
            elif hook.offload:
                layers.append((module, hook.weights_map))
    return partial(_follow, groups, layers)


def _follow(groups: list[Any], layers: list[tuple[Any, Any]], weights: Sequence[torch.Tensor]) -> None:
    moved = set(map(id, weights))
    for group in groups:
        for tensor in group.cpu_param_dict:  # empty without a stream
            if id(tensor) in moved and tensor.device.type == "cpu":
                group.cpu_param_dict[tensor] = tensor.data
    for module, kept in layers:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if id(tensor) in moved and name in kept:
                kept[name].data = tensor.data


def why_not_carried(model: Any) -> str:
    """A phrase of which the model is the subject; empty if all its hooks are an offload that a copy need not have."""
    import torch

    for path, module in model.named_modules():
        where = f"({path}) " if path else ""
        for hook in _of_accelerate(module):
            kind = type(hook).__name__
            if kind != "CpuOffload" and not _is_of_weights(hook):
                return f"{where}is moved by accelerate ({kind}, as of device_map)"
        others = _others(module).items()
        unknown = [n for n, each in others if not (_keeps_nothing(each) or step_cache.is_of_cache(model, each))]
        if unknown:
            return f"{where}has hooks of diffusers: {', '.join(unknown)}"
        group = getattr(_of_diffusers(module).get("group_offloading"), "group", None)
        if getattr(group, "offload_to_disk_path", None):
            return f"{where}is offloaded to disk"
    with without_hooks(model):
        if any(tensor.device == torch.device("meta") for tensor in (*model.parameters(), *model.buffers())):
            return "has weights that its offload keeps elsewhere"
    return ""


@contextlib.contextmanager
def without_hooks(model: Any) -> Iterator[None]:
    """The model as its classes made it, without offload and step cache, its weights where the offload keeps them."""
    with Undo() as undo:
        for module in model.modules():
            if GROUPS.intersection(_of_diffusers(module)):
                _wait(module)
            hooks = _of_accelerate(module)
            if kept := [(name, _bare(hook)) for name, hook in _others(module).items() if _keeps_nothing(hook)]:
                vars(module)[_CARRIED] = kept
                undo.add(partial(vars(module).pop, _CARRIED))
            is_hooked = hasattr(module, "_hf_hook") or bool(_of_diffusers(module))
            # A registry without hooks knows those of its children; a forward of the program's own is no hook's.
            names = _OF_HOOKS if is_hooked and not _has_own_forward(module) else _OF_HOOKS[:-1]
            for name in names:
                if name in vars(module):
                    undo.add(partial(vars(module).__setitem__, name, vars(module).pop(name)))
            for hook in filter(_is_of_weights, hooks):
                _fill(module, hook, undo)
        yield


def set_up(model: Any) -> None:
    """Put on a copy the hooks of the original that a copy has."""
    from diffusers.hooks import HookRegistry

    for module in model.modules():
        for name, hook in vars(module).pop(_CARRIED, ()):
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)


def _others(module: Any) -> dict[str, Any]:
    """Hooks of diffusers that are no offload, by name."""
    return {name: hook for name, hook in _of_diffusers(module).items() if name not in GROUPS}


def _keeps_nothing(hook: Any) -> bool:
    """Whether a hook of diffusers computes the same in each call, by values that a copy can have."""
    import torch

    values = (value for name, value in vars(hook).items() if name != "fn_ref")
    is_plain = all(isinstance(value, (torch.dtype, str, int, float, type(None))) for value in values)
    return is_plain and not hook._is_stateful and type(hook).__module__.startswith("diffusers.")


def _bare(hook: Any) -> Any:
    """A hook that is on no module."""
    bare = copy.copy(hook)
    bare.fn_ref = None
    return bare


def _has_own_forward(module: Any) -> bool:
    """Whether the program has set its forward, inside the hooks or outside: they wrap what they find, and say so."""
    found = inspect.unwrap(vars(module).get("forward", type(module).forward))
    if found.__module__ == "diffusers.hooks.hooks":  # of releases whose hooks do not say what they wrap
        innermost = module._diffusers_hook._fn_refs[0]
        found = inspect.unwrap(innermost.original_forward or innermost.forward)
    return getattr(found, "__func__", found) is not inspect.unwrap(type(module).forward)


def _of_diffusers(module: Any) -> dict[str, Any]:
    """Hooks by name."""
    hooks: dict[str, Any] = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return hooks


def _of_accelerate(module: Any) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(hook.hooks) if type(hook).__name__ == "SequentialHook" else [hook]


def _is_of_weights(hook: Any) -> bool:
    """Whether a hook is one of `enable_sequential_cpu_offload`: of a layer, its weights in a map, or of all."""
    known = type(hook).__name__ == "AlignDevicesHook" and not hook.place_submodules
    return known and (not hook.offload or hook.weights_map is not None)


def _fill(module: Any, hook: Any, undo: Undo) -> None:
    """Put a layer's weights where accelerate has placeholders."""
    import torch

    if not hook.offload:
        return
    for place in (module._parameters, module._buffers):
        for name, placeholder in list(place.items()):
            if placeholder is None or placeholder.device.type != "meta" or name not in hook.weights_map:
                continue
            value = hook.weights_map[name]
            is_parameter = isinstance(placeholder, torch.nn.Parameter)
            place[name] = torch.nn.Parameter(value, placeholder.requires_grad) if is_parameter else value
            undo.add(partial(place.__setitem__, name, placeholder))


def _wait(module: Any) -> None:
    """Until a group that is prefetched on a stream of its own is there."""
    import torch

    hook = module._diffusers_hook.hooks.get("group_offloading")
    if hook is not None and hook.group.stream is not None:
        torch.cuda.synchronize(hook.group.onload_device)
