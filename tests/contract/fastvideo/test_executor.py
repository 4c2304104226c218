"""FastVideo's own multiprocessing executor spawns its workers; under `wanshim run --` each has the patches.

Real are the executor, its spawn, its `worker_main` and its remote calls. The one double is `Worker`, which wants a GPU
and a full pipeline: the tiny one decodes with a tiny VAE of FastVideo when it is asked.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.contract.launching import answers_under_run

FEATURE = "fastvideo.vae_decode"
PROGRAM = """
import json, os
from types import SimpleNamespace
from pathlib import Path

import fastvideo.worker.worker_base as worker_base


class TinyWorker:
    def __init__(self, fastvideo_args, local_rank, rank, distributed_init_method):
        self.rank, self.method = rank, distributed_init_method

    def init_device(self):
        import fastvideo.distributed.parallel_state as parallel_state
        from tests.contract.fastvideo import encode_ranks

        encode_ranks._use_cpu(parallel_state)
        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.rank), WORLD_SIZE="2")
        parallel_state.maybe_init_distributed_environment_and_model_parallel(1, 2, self.method)

    def look(self):
        import torch
        from tests.contract.fastvideo.vae import LATENT_CHANNELS, decode, make_vae

        torch.set_num_threads(1)
        with torch.no_grad():
            decode(make_vae("2.1", torch.float32), torch.zeros(1, LATENT_CHANNELS["2.1"], 1, 2, 2), tiled=False)
        import wanshim

        row = wanshim.report().row("fastvideo.vae_decode")
        return {"rank": self.rank, "pid": os.getpid(), "state": [row.state, row.calls]}

    def shutdown(self):
        return {}


worker_base.Worker = TinyWorker  # a spawned child runs this line too

if __name__ == "__main__":
    from fastvideo.worker.executor import Executor

    args = SimpleNamespace(distributed_executor_backend="mp", num_gpus=2, master_port=None)
    executor = Executor.get_class(args)(args)
    try:
        workers = executor.collective_rpc("look")
    finally:
        executor.shutdown()
    found = {"executor": type(executor).__name__, "pid": os.getpid(), "workers": workers}
    Path("answers", "parent.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("prefix", "state"),
    [(True, ["exercised", 1]), pytest.param(False, ["off", 0], marks=pytest.mark.slow)],
    ids=["under_wanshim_run", "without_it"],
)
def test_worker_of_the_spawning_executor_has_the_feature_just_under_wanshim_run(
    prefix: bool, state: list[object], tmp_path: Path
) -> None:
    (tmp_path / "serve.py").write_text(PROGRAM)
    (found,) = answers_under_run(tmp_path, FEATURE, sys.executable, "serve.py", prefix=prefix)
    assert found["executor"] == "MultiprocExecutor"
    assert [(worker["rank"], worker["state"]) for worker in found["workers"]] == [(0, state), (1, state)]
    assert len({found["pid"], *(worker["pid"] for worker in found["workers"])}) == 3
