"""Every worker of torchrun and of accelerate has the patches under `wanshim run --`, and none without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.launching import answers_under_run, light_diffsynth, tool

FEATURE = "diffsynth.patchify"
ONE_MACHINE = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
# --multi_gpu is how accelerate starts several workers without MPI; with --cpu alone it starts one, whatever the number.
LAUNCHERS = {
    "torchrun": (2, ["torchrun", "--standalone", "--nproc_per_node", "2"]),
    "accelerate": (
        2,
        ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", *ONE_MACHINE],
    ),
    "accelerate_cpu": (1, ["accelerate", "launch", "--cpu", "--num_processes", "1", *ONE_MACHINE]),
}
# What a training script does; it knows nothing of wanshim but the look at the end.
WORKER = """
import json, os, sys
from pathlib import Path
from tests.contract.diffsynth.calls import direct_forward

try:
    answer = list(direct_forward().shape)
except ValueError as error:
    answer = str(error)
wanshim = sys.modules.get("wanshim")
row = wanshim.report().row("diffsynth.patchify") if wanshim else None
found = {"rank": int(os.environ.get("RANK", 0)), "answer": answer}
found |= {"state": row.state, "calls": row.calls} if row else {"state": "no wanshim"}
Path("answers", f"{os.getpid()}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow  # each is several processes, and those of accelerate import all of DiffSynth
@pytest.mark.parametrize(
    "launcher",
    ["torchrun", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("accelerate", "accelerate_cpu"))],
)
def test_every_worker_has_the_feature_applied_and_called(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER)
    if launcher == "torchrun":
        light_diffsynth(tmp_path)
    workers, (program, *options) = LAUNCHERS[launcher]
    found = answers_under_run(tmp_path, FEATURE, tool(program), *options, "train.py")
    assert sorted(worker.pop("rank") for worker in found) == list(range(workers))
    assert found == [{"answer": [1, 16, 3, 8, 8], "state": "exercised", "calls": 1}] * workers


@pytest.mark.slow
def test_worker_of_a_launcher_without_wanshim_run_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER)
    light_diffsynth(tmp_path)
    launcher = [tool("torchrun"), "--standalone", "--nproc_per_node", "1"]
    (worker,) = answers_under_run(tmp_path, FEATURE, *launcher, "train.py", prefix=False)
    assert worker["state"] == "no wanshim"
    assert "unpack" in worker["answer"]
