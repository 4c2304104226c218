"""Why a model computes otherwise than its classes do, or is looked at while it computes: who computes it in another way
would leave that out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def why_not_plain(
    modules: Iterable[nn.Module],
    rebound: Callable[[nn.Module], bool] | None = None,
    *,
    may_be_compiled: bool = False,
) -> tuple[nn.Module | None, str] | None:
    """The first module that is not plain and the reason, a phrase of which it is the subject; None: all are plain. The
    module is None if the reason is one of all modules.

    Args:
        rebound: whether the forward that a module has in place of its class's gives equal bits; None: none does.
        may_be_compiled: by torch.compile.
    """
    if _global_forward_hooks or _global_forward_pre_hooks:
        return None, "torch has forward hooks for all modules"
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            return module, "has forward hooks"
        is_whole = is_optimized(module)
        if (is_whole or module._compiled_call_impl is not None) and not may_be_compiled:
            return module, "is compiled, which computes other bits"
        if has_own_forward(module) and not is_whole and (rebound is None or not rebound(module)):
            return module, "has a forward of its own, which something else has set"
        if drops(module):
            return module, "drops at random: call eval() if it should not"
    return None


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module has another forward than its class's, which accelerate leaves on it behind its hooks."""
    own = module.__dict__.get("forward")
    is_left = isinstance(own, MethodType) and own.__func__ is type(module).forward and own.__self__ is module
    return own is not None and not is_left


def traced_by() -> str | None:
    """`torch.jit.trace` or `torch.func`, if this thread runs inside it now, where a call makes more than values."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    return "torch.func" if torch._C._functorch.peek_interpreter_stack() is not None else None


def seen_by() -> str | None:
    """The mode, or as `traced_by`, that sees each operation of this thread now, and may record or change it; None: none
    does. Kernels of ours and computations of another process would escape it."""
    if (traced := traced_by()) is not None:
        return traced
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    others = (mode for mode in modes if not isinstance(mode, DeviceContext))  # of torch.set_default_device
    return next((f"a {type(mode).__qualname__}" for mode in others), None)


def drops(module: nn.Module) -> bool:
    """Whether a module would drop at random in a call made now."""
    return isinstance(module, _DropoutNd) and module.training and module.p > 0


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has compiled it, or a part of it."""
    return any(map(is_one_graph, model.modules()))


def is_one_graph(module: nn.Module) -> bool:
    """Whether torch.compile has compiled a call of it, with all that it calls."""
    return is_optimized(module) or module._compiled_call_impl is not None


def is_optimized(value: Any) -> bool:
    """Whether it is a module that `torch.compile(module)` returned."""
    return f"{type(value).__module__}.{type(value).__qualname__}" == "torch._dynamo.eval_frame.OptimizedModule"
