from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from wanshim.core.training.process_group import parse_timeout_s, read_timeouts, with_timeout
from wanshim.errors import SettingInvalid

HALF_HOUR = timedelta(minutes=30)


@pytest.fixture
def init(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a process group of one through an `init_process_group` that waits half an hour."""
    address = f"file://{tmp_path}/store"

    def start(*args: Any, **kwargs: Any) -> None:
        made = with_timeout(dist.init_process_group, timedelta(seconds=77))
        made("gloo", address, *args, rank=0, world_size=1, **kwargs)

    yield start
    dist.destroy_process_group()


def test_timeout_where_the_caller_gave_none_is_set_and_read_back(init: Callable[..., Any]) -> None:
    init()
    assert read_timeouts()["cpu"] == timedelta(seconds=77)


def test_timeout_given_as_none_is_set(init: Callable[..., Any]) -> None:
    init(timeout=None)
    assert read_timeouts()["cpu"] == timedelta(seconds=77)


def test_timeout_of_the_caller_by_name_stays(init: Callable[..., Any]) -> None:
    init(timeout=HALF_HOUR)
    assert read_timeouts()["cpu"] == HALF_HOUR


def test_timeout_of_the_caller_by_position_stays(init: Callable[..., Any]) -> None:
    init(HALF_HOUR)
    assert read_timeouts()["cpu"] == HALF_HOUR


def test_timeout_of_a_further_group_needs_new_group_too(init: Callable[..., Any]) -> None:
    init()
    untouched = dist.new_group([0])
    assert read_timeouts(untouched)["cpu"] == HALF_HOUR  # the backend's default, not the default group's 77 s
    longer = with_timeout(dist.new_group, timedelta(seconds=77))([0])
    assert read_timeouts(longer)["cpu"] == timedelta(seconds=77)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_timeout_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(SettingInvalid, match=r"timeout of a process group=.* Expected seconds above zero"):
        parse_timeout_s(seconds)


def test_timeout_in_seconds_is_parsed() -> None:
    assert parse_timeout_s(1800) == HALF_HOUR
