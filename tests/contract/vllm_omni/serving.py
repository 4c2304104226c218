"""A server of vLLM-Omni's own executor and worker process, without a GPU.

Real are `MultiprocDiffusionExecutor`, its spawn, `WorkerProc.worker_main` with its queues and busy loop, and the remote
call. Two things stand in, both for want of a GPU: the worker that `WorkerProc` makes, which would load a pipeline onto
one, and `Stream` of the platform, which is None where vLLM-Omni finds no device, so that 0.16 and 0.18 could not import
their worker. Nothing names wanshim but the environment: it comes by its entry point.
"""

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
        from wanshim.select import catalog

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
