"""vLLM-Omni's own executor spawns its diffusion worker, and that process's `worker_main` switches wanshim on.

Real are `MultiprocDiffusionExecutor`, its spawn, `WorkerProc.worker_main` with its queues and busy loop, and the remote
call. Two things stand in, both for want of a GPU: the worker that `WorkerProc` makes, which would load a pipeline onto
one, and `Stream` of the platform, which is None where vLLM-Omni finds no device, so that 0.16 and 0.18 could not import
their worker. Nothing names wanshim but the environment: it comes by its entry point.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.launching import answers_under_run
from tests.contract.vllm_omni.patched import FEATURE, PATCHED

PROGRAM = """
import importlib, json, os, sys
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm_omni.platforms.interface import UnspecifiedOmniPlatform

UnspecifiedOmniPlatform.Stream = torch.Stream

import vllm_omni.diffusion.worker.diffusion_worker as diffusion_worker

BEFORE = "wanshim" in sys.modules  # a spawned child runs this file before it runs worker_main


class TinyWorker:
    def look(self):
        after = "wanshim" in sys.modules
        import wanshim
        from wanshim import catalog

        feature = os.environ["WANSHIM_FEATURES"]
        for seam in catalog.discover().features[feature].seams:
            importlib.import_module(seam.module)
        row = wanshim.report().row(feature)
        return {"pid": os.getpid(), "before": BEFORE, "after": after, "state": row.state, "reason": row.reason}

    def execute_method(self, method, *args, **kwargs):
        return getattr(self, method)(*args, **kwargs)

    def shutdown(self):
        pass


diffusion_worker.WorkerProc._create_worker = lambda self, *_: TinyWorker()

if __name__ == "__main__":
    import multiprocessing

    from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor

    multiprocessing.set_start_method("spawn")  # as vLLM-Omni's engine does before it makes an executor
    config = SimpleNamespace(
        num_gpus=1,
        master_port=1,
        worker_extension_cls=None,
        custom_pipeline_args=None,
        step_execution=True,
        parallel_config=SimpleNamespace(enable_expert_parallel=False, use_hsdp=False, hsdp_replicate_size=1),
    )
    executor = MultiprocDiffusionExecutor(config)
    try:
        worker = executor.collective_rpc("look", timeout=240, unique_reply_rank=0)
    finally:
        executor.shutdown()
    found = {"pid": os.getpid(), "active": "wanshim" in sys.modules, "worker": worker}
    Path("answers", "parent.json").write_text(json.dumps(found))
"""
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
