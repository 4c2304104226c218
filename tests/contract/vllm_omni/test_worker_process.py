"""vLLM-Omni's own executor spawns its diffusion worker, and that process's `worker_main` switches wanshim on: see
serving.py for what is real."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.launching import answers_under_run
from tests.contract.vllm_omni.patched import FEATURE, PATCHED
from tests.contract.vllm_omni.serving import PROGRAM

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PATCHED, reason="this release, such as 0.14.0, has nothing to patch: see test_plugins"),
]


def served(folder: Path) -> dict[str, Any]:
    (folder / "serve.py").write_text(PROGRAM)
    (found,) = answers_under_run(folder, FEATURE, sys.executable, "serve.py", prefix=False, timeout_s=550)
    assert found["pid"] != found["worker"]["pid"]
    assert not found["active"]
    return found["worker"]  # type: ignore[no-any-return]


def test_spawned_worker_process_applies_the_feature(tmp_path: Path) -> None:
    worker = served(tmp_path)
    assert (worker["before"], worker["after"]) == (False, True)
    assert worker["state"] == "applied", worker["reason"]


@pytest.mark.slow
def test_spawned_worker_process_without_the_plugin_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    worker = served(tmp_path)
    assert (worker["before"], worker["after"], worker["state"]) == (False, False, "off")
