"""The time a process group waits for a slow rank.

`NCCL_TIMEOUT`, which training guides recommend, is read by neither PyTorch nor NCCL: only the `timeout`
argument of `torch.distributed.init_process_group` counts, and its default is 10 minutes for NCCL and 30 for
gloo.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from wanshim.values import checked_seconds

Result = TypeVar("Result")


def parse_timeout_s(seconds: float) -> timedelta:
    """`seconds` as a timeout.

    Raises:
        SettingInvalid: not a number of seconds that can be waited.
    """
    return timedelta(seconds=checked_seconds(seconds, "the timeout of a process group"))


def with_timeout(make_group: Callable[..., Result], timeout: timedelta) -> Callable[..., Result]:
    """`init_process_group` or `new_group` that waits `timeout` where its caller named none.

    Both need it: a group made by `new_group` has its backend's default timeout, not that of the default
    group.
    """
    signature = inspect.signature(make_group)

    @functools.wraps(make_group)
    def wait_longer(*args: Any, **kwargs: Any) -> Result:
        call = signature.bind(*args, **kwargs)
        if call.arguments.get("timeout") is None:
            call.arguments["timeout"] = timeout
        return make_group(*call.args, **call.kwargs)

    return wait_longer


def read_timeouts(group: Any = None) -> dict[str, timedelta]:
    """The timeout of each backend of a process group, as the group itself has it: {"cuda": 0:30:00, ...}.

    Args:
        group: default the default process group.
    """
    import torch
    import torch.distributed as dist

    group = group or dist.group.WORLD
    timeouts: dict[str, timedelta] = {}
    for device in group._device_types:
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            timeouts[device.type] = timeout
    return timeouts
