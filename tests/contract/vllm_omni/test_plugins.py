"""vLLM's and vLLM-Omni's own plugin loaders switch wanshim on in a spawned process, by entry point, each alone.

The diffusion worker of every release from 0.14 on calls vLLM-Omni's loader first thing, before a pipeline is imported;
vLLM's own workers call vLLM's.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.contract.vllm_omni.patched import FEATURE, PATCHED
from tests.contract.vllm_omni.plugin_process import LOADERS, load

EXPECTED = "applied" if PATCHED else "refused"  # 0.14 has nothing that could be patched
pytestmark = pytest.mark.timeout(400)


def spawned(group: str, feature: str) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(load, group, feature).result(timeout=300)


@pytest.mark.parametrize("group", LOADERS)
def test_plugin_loaded_in_a_spawned_process_applies_or_refuses_the_feature(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_FEATURES", FEATURE)
    found = spawned(group, FEATURE)
    assert (found["before"], found["after"]) == (False, True)
    assert found["state"] == EXPECTED, found["reason"]


def test_vllm_plugins_without_wanshim_leaves_the_spawned_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_FEATURES", FEATURE)
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    found = spawned("vllm_omni.general_plugins", FEATURE)
    assert (found["after"], found["state"]) == (False, "off")


def test_diffusion_worker_calls_the_loader_before_it_builds_anything() -> None:
    """Read, not imported: on a machine without a platform of vLLM-Omni's, 0.16 cannot import its worker."""
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("diffusion") / "worker" / "diffusion_worker.py"
    main = source.read_text().partition("def worker_main(")[2]
    assert -1 < main.find("load_omni_general_plugins()") < main.find("worker_proc = WorkerProc(")
