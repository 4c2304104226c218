"""A step cache of diffusers on a transformer: the same cache on a worker's copy, told which forward of a step it has.

A cache's hooks keep, for each context of a pipeline, what earlier forwards computed. The forward with the prompt and
the one without have contexts of their own, so each process may keep its own.
"""

from __future__ import annotations

from typing import Any

# Their state is by context alone. Others read the pipeline in a callback, or keep one state for both forwards.
CARRIED = {
    "FirstBlockCacheConfig": "diffusers.hooks.first_block_cache",
    "MagCacheConfig": "diffusers.hooks.mag_cache",
    "TaylorSeerCacheConfig": "diffusers.hooks.taylorseer_cache",
}


def is_of_cache(model: Any, hook: Any) -> bool:
    """Whether a hook belongs to the model's cache, and a copy can have it too."""
    kind = type(getattr(model, "_cache_config", None)).__name__
    return kind in CARRIED and type(hook).__module__ == CARRIED[kind]


def sent(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `forward`, from those of the model."""
    return (model, _context(model), *args), kwargs


def forward(model: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's forward in this context of its cache."""
    from diffusers.hooks import HookRegistry, hooks

    if hasattr(hooks, "_set_cache_context"):  # 0.42 and later
        hooks._set_cache_context(model, context)
    else:
        HookRegistry.check_if_exists_or_initialize(model)._set_context(context)
    return model(*args, **kwargs)


def set_up(model: Any) -> None:
    """Put the cache of the original on a copy."""
    config, model._cache_config = model._cache_config, None
    model.enable_cache(config)


def _context(model: Any) -> Any:
    from diffusers.hooks.hooks import StateManager

    for module in model.modules():
        for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values():
            for value in vars(hook).values():
                if isinstance(value, StateManager):
                    return getattr(value, "_context", None) or getattr(value, "_current_context", None)
    return None
