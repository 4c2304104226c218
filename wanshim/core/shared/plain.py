"""Why a model computes otherwise than its classes do: who computes it in another way would leave that out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks


def why_not_plain(
    modules: Iterable[nn.Module], rebound: Callable[[nn.Module], bool] | None = None
) -> tuple[nn.Module | None, str] | None:
    """The first module that is not plain and the reason, a phrase of which it is the subject; None: all are plain. The
    module is None if the reason is one of all modules.

    Args:
        rebound: whether the forward that a module has in place of its class's gives equal bits; None: none does.
    """
    if _global_forward_hooks or _global_forward_pre_hooks:
        return None, "torch has forward hooks for all modules"
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            return module, "has forward hooks"
        if "forward" in module.__dict__ and (rebound is None or not rebound(module)):
            return module, "has a forward of its own, which something else has set"
        if module._compiled_call_impl is not None:
            return module, "is compiled, which computes other bits"
        if drops(module):
            return module, "drops at random: call eval() if it should not"
    return None


def drops(module: nn.Module) -> bool:
    """Whether a module would drop at random in a call made now."""
    return isinstance(module, _DropoutNd) and module.training and module.p > 0
