"""Triton hashes its own files before the first kernel needs that, on a machine with GPUs alone."""

from __future__ import annotations

import os
import time

import pytest

from wanshim.core.shared import gpus, optional_triton
from wanshim.core.strict_blocks import StrictOperators

pytestmark = pytest.mark.skipif(optional_triton.triton is None, reason="this torch comes without Triton")


@pytest.fixture(autouse=True)
def _has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_triton, "_hashing", None)


@pytest.mark.parametrize("count", [0, 1, None])
def test_key_is_there_once_the_operators_were_made(count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("triton.runtime.cache")
    if not hasattr(runtime, "triton_key"):
        runtime = pytest.importorskip("triton.compiler.compiler")
    runtime.triton_key.cache_clear()
    monkeypatch.setattr(gpus, "in_sight", lambda visible: count)
    StrictOperators(lambda text: None)
    thread = optional_triton._hashing
    assert thread is not None
    thread.join(60)
    StrictOperators(lambda text: None)
    assert optional_triton._hashing is thread, "once a process"
    assert runtime.triton_key.cache_info().currsize == (0 if count == 0 else 1)


def test_a_fork_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_triton, "_hash", lambda: time.sleep(0.5))
    optional_triton.hash_ahead()
    thread = optional_triton._hashing
    assert thread is not None
    assert thread.is_alive()
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert not thread.is_alive()
    assert os.waitpid(child, 0)[1] == 0
