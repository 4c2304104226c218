"""The variable that the constructor of a NCCL group reads: there for each thread that makes one, and gone after."""

from __future__ import annotations

import os
import threading

import pytest

from wanshim.core.shared import nccl


@pytest.mark.parametrize("before", [None, "3"])
def test_two_threads_that_make_a_group_each_find_the_variable_and_leave_it_as_it_was(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nccl._ERROR_HANDLING, raising=False)
    if before is not None:
        monkeypatch.setenv(nccl._ERROR_HANDLING, before)
    first_is_in, seen = threading.Event(), []

    def second() -> None:
        first_is_in.wait()
        with nccl._watchdog_that_only_watches():
            first.join()
            seen.append(os.environ.get(nccl._ERROR_HANDLING))

    def make_first() -> None:
        with nccl._watchdog_that_only_watches():
            first_is_in.set()
            other.join(0.2)  # it would come in between
            seen.append(os.environ.get(nccl._ERROR_HANDLING))

    first, other = threading.Thread(target=make_first), threading.Thread(target=second)
    other.start()
    first.start()
    other.join()
    assert seen == ["0", "0"]
    assert os.environ.get(nccl._ERROR_HANDLING) == before
