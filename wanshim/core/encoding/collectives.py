"""A guard for code that one rank runs alone: a collective in it becomes an error instead of a hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from wanshim.errors import WanshimError
from wanshim.undo import Undo

# Operator namespaces of torch.distributed: eager process groups, functional collectives, and their autograd
# form.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


@contextmanager
def no_collectives(doing: str) -> Iterator[None]:
    """Refuse every collective of this thread, and every new process group, while the body runs.

    Args:
        doing: what the one rank does, for the message.

    Raises:
        WanshimError: the body called one.
    """
    with _RefuseCollectives(doing), _refuse_new_groups(doing):
        yield


class _RefuseCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, doing: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._doing = doing

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile the body: else it computes without a compiler here and, in torch 2.11, ever after.
        A collective in a graph comes here too."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _NAMESPACES:
            raise _refusal(str(func), self._doing)
        return func(*args, **(kwargs or {}))


@contextmanager
def _refuse_new_groups(doing: str) -> Iterator[None]:
    """Ranks meet in the store to form a group, not in an operator, so the dispatcher never sees it."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise _refusal("new_group", doing)

    with Undo() as undo:
        if dist.is_available() and dist.is_initialized():
            undo.set(torch.distributed.distributed_c10d, {"_new_process_group_helper": refuse})
        yield


def _refusal(collective: str, doing: str) -> WanshimError:
    return WanshimError(
        f"{doing} called the collective {collective} on one rank, and the others would never have joined it",
        expected="an encoder that is loaded and run without the process group",
        hint="Turn off sharding and CPU offload of the text encoder, or use mode='per_rank'",
    )
