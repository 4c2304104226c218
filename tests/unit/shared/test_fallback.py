"""`or_framework`: whatever of ours fails, the framework computes the call, and the cause is said in one line."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from wanshim.core.shared.fallback import Fallback, by_framework, cause_of, or_framework
from wanshim.errors import RankAbsent, RankDisagreement, RanksFailed, SettingInvalid

PTXAS = "PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal : Value 'sm_120' is not defined"


class PTXASError(Exception):
    """As triton.runtime.errors has it."""


FAILURES = (
    RuntimeError("\n  Failed to find C compiler. Please specify via CC.\nmore"),
    ImportError("libcuda.so.1: cannot open shared object file"),
    PTXASError(PTXAS),
    subprocess.CalledProcessError(1, ["gcc"]),
    OSError(28, "No space left on device"),
    MemoryError(),
    RanksFailed("single decode on 1 ranks failed on 1"),
    RankAbsent("rank 1 did not call decode within 2 s"),
)


def wrapped(error: BaseException, strict: bool = False) -> tuple[Any, list[str]]:
    """A method that raises, in front of one that doubles."""
    said: list[str] = []

    def method(x: int) -> int:
        raise error

    return or_framework(
        method, lambda x: 2 * x, said.append, strict=lambda: strict, on_error=lambda: said.append("raised")
    ), said


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_failure_leaves_the_call_to_the_framework_and_says_the_cause_in_one_line(error: Exception) -> None:
    call, said = wrapped(error)
    assert [call(1), call(2)] == [2, 4]
    assert said == [cause_of(error)] * 2
    assert "\n" not in said[0]
    call, said = wrapped(error, strict=True)
    with pytest.raises(type(error)):
        call(1)
    assert said == ["raised"]


def test_the_cause_is_the_first_line_that_says_something() -> None:
    assert cause_of(FAILURES[0]) == "RuntimeError: Failed to find C compiler. Please specify via CC."
    assert cause_of(FAILURES[2]) == "PTXASError: PTXAS error: Internal Triton PTX codegen error"
    assert cause_of(MemoryError()) == "MemoryError"
    trace = 'Original Traceback (most recent call last):\n  File "a.py", line 1, in load\n    read()\n    ~~~~^^\n'
    of_worker = OSError(f"Caught OSError in DataLoader worker process 0.\n{trace}OSError: no such video\n")
    assert cause_of(of_worker) == "OSError: no such video"
    assert cause_of(RanksFailed("a rank is gone")) == "a rank is gone."


def test_a_rule_of_ours_is_no_failure_that_strict_raises() -> None:
    call, said = wrapped(Fallback("one process"), strict=True)
    assert (call(1), said) == (2, ["one process"])


@pytest.mark.parametrize(
    "error",
    [RankDisagreement("a"), RankDisagreement("b"), SettingInvalid("c"), KeyboardInterrupt(), SystemExit(1)],
    ids=lambda error: type(error).__name__,
)
def test_what_the_framework_would_hide_is_raised(error: BaseException) -> None:
    call, said = wrapped(error)
    with pytest.raises(type(error)):
        call(1)
    assert said == ["raised"]


def test_the_user_s_own_error_is_the_framework_s() -> None:
    def own(x: int) -> int:
        raise ValueError("the framework's words")

    with pytest.raises(ValueError, match="the framework's words") as caught:
        or_framework(lambda x: x // 0, own, lambda reason: None)(1)
    assert caught.value.__context__ is None  # and holds no memory of the failed call


def test_a_call_for_the_framework_s_own_result_is_not_counted() -> None:
    call, said = wrapped(ValueError("never called"))
    with by_framework():
        assert call(3) == 6
    assert said == []
