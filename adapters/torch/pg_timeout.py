"""`torch.pg_timeout`: process groups wait `WANSHIM_PG_TIMEOUT_S` where nobody said how long.

FastVideo and DiffSynth call `init_process_group` without a timeout, so NCCL gives up after 10 minutes, in the
middle of a slow validation or checkpoint. `NCCL_TIMEOUT` changes nothing: neither PyTorch nor NCCL reads it.
FastVideo's collectives run in groups made by `new_group`, which has a default of its own, so both are seams.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanshim import settings
from wanshim.patching import Feature, Finding, Kind, Seam, SeamState, SourceTree
from wanshim.patching.verdict import Verdict

if TYPE_CHECKING:
    from datetime import timedelta

INIT = "torch.distributed.distributed_c10d:init_process_group"
NEW = "torch.distributed.distributed_c10d:new_group"


def _wait_longer(original: Callable[..., Any], seam: SeamState) -> Callable[..., Any]:
    from datetime import timedelta  # needed by few: not at activation

    name, signature = original.__name__, inspect.signature(original)

    def make_group(*args: object, **kwargs: object) -> Any:
        seconds = seam.settings.pg_timeout_s
        if seconds is None or not seam.enter():
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        if call.arguments.get("timeout") is None:
            call.arguments["timeout"] = timedelta(seconds=seconds)
        else:
            seam.fall_back(f"the caller of {name} names a timeout")
        made = original(*call.args, **call.kwargs)
        _read_back(name, made, seam)
        return made

    return make_group


def _read_back(name: str, made: Any, seam: SeamState) -> None:
    """Put into the report what the group really has, as the group itself says it."""
    import torch.distributed as dist

    group = dist.group.WORLD if made is None else made
    if not isinstance(group, dist.ProcessGroup):
        return  # this rank is no member of the new group
    found = read_timeouts(group)
    text = ", ".join(f"{device} {_seconds(timeout)}" for device, timeout in found.items()) or "no backend says"
    note = f"{name}: the group waits {text}"
    if note not in seam.notes:
        seam.notes.append(note)


def read_timeouts(group: Any) -> dict[str, timedelta]:
    """The timeout of each backend of a process group, as the group itself has it: {"cuda": 0:30:00, ...}."""
    from datetime import timedelta

    import torch

    timeouts: dict[str, timedelta] = {}
    for device in group._device_types:
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            timeouts[device.type] = timeout
    return timeouts


def _seconds(timeout: timedelta) -> str:
    return f"{timeout.total_seconds():g} s"


def _judge(source: SourceTree) -> Finding | None:
    """The seams fit wherever both functions take a `timeout` that may be left out."""
    for target in (INIT, NEW):
        node = source.node(target)
        if node is None:
            return Finding(Verdict.ABSENT, f"this PyTorch has no {target.split(':')[1]}")
        if not isinstance(node, ast.FunctionDef) or not _takes_timeout(node):
            return Finding(Verdict.REFUSE, f"{target} takes no timeout that may be left out")
    return Finding(Verdict.PATCH, "init_process_group and new_group take a timeout that may be left out")


def _takes_timeout(function: ast.FunctionDef) -> bool:
    named = [*function.args.posonlyargs, *function.args.args]
    optional = named[len(named) - len(function.args.defaults) :] + function.args.kwonlyargs
    return any(argument.arg == "timeout" for argument in optional)


def _blocked(read: settings.Settings) -> str | None:
    return None if read.pg_timeout_s is not None else "WANSHIM_PG_TIMEOUT_S is not set"


_LEDGER: dict[str, Any] = {
    "kind": Kind.WRAPT,
    "why": "a caller that names no timeout gets 10 minutes with NCCL, and no variable changes that",
    "upstream": "https://github.com/pytorch/pytorch/issues/104506",
    "remove_when": "PyTorch reads the default timeout of process groups from the environment",
}

FEATURE = Feature(
    name="torch.pg_timeout",
    summary="process groups wait WANSHIM_PG_TIMEOUT_S where the caller named no timeout",
    switched_on_by="pg_timeout_s",
    judge=_judge,
    blocked=_blocked,
    seams=(Seam(INIT, _wait_longer, **_LEDGER), Seam(NEW, _wait_longer, **_LEDGER)),
)
