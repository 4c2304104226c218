from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from wanshim.adapters.torch import pg_timeout
from wanshim.patching.seam import SeamState

HALF_HOUR = timedelta(minutes=30)


def longer(make_group: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a function that makes groups, which waits 77 seconds."""
    seams = {seam.qualname: seam for seam in pg_timeout.FEATURE.seams}
    state = SeamState(seams[make_group.__name__])
    state.off, state.settings = False, replace(state.settings, pg_timeout_s=77.0)
    made: Callable[..., Any] = state.replace(make_group, state)
    return made


def timeout_of(group: Any = None) -> timedelta:
    return pg_timeout.read_timeouts(dist.group.WORLD if group is None else group)["cpu"]


@pytest.fixture
def init(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a process group of one through an `init_process_group` that waits longer."""
    address = f"file://{tmp_path}/store"

    def start(*args: Any, **kwargs: Any) -> None:
        longer(dist.init_process_group)("gloo", address, *args, rank=0, world_size=1, **kwargs)

    yield start
    dist.destroy_process_group()


def test_timeout_where_the_caller_gave_none_is_set_and_read_back(init: Callable[..., Any]) -> None:
    init()
    assert timeout_of() == timedelta(seconds=77)


def test_timeout_given_as_none_is_set(init: Callable[..., Any]) -> None:
    init(timeout=None)
    assert timeout_of() == timedelta(seconds=77)


def test_timeout_of_the_caller_by_name_stays(init: Callable[..., Any]) -> None:
    init(timeout=HALF_HOUR)
    assert timeout_of() == HALF_HOUR


def test_timeout_of_the_caller_by_position_stays(init: Callable[..., Any]) -> None:
    init(HALF_HOUR)
    assert timeout_of() == HALF_HOUR


def test_timeout_of_a_further_group_needs_new_group_too(init: Callable[..., Any]) -> None:
    init()
    untouched = dist.new_group([0])
    assert timeout_of(untouched) == HALF_HOUR  # the backend's default, not the default group's 77 s
    assert timeout_of(longer(dist.new_group)([0])) == timedelta(seconds=77)
