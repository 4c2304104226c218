"""`wanshim run --gpus N`: a command for one GPU runs in N processes that train each sample together, or none starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.launching import tool

SCRIPT = """
import json, os, sys
from pathlib import Path
names = ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "WANSHIM_PLAN")
Path(f"started.{os.environ['RANK']}").write_text(
    json.dumps({"arguments": sys.argv[1:], "optimized": sys.flags.optimize, **{n: os.environ.get(n) for n in names}})
)
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    return subprocess.run(
        [sys.executable, "-m", "wanshim", "run", *arguments],
        cwd=folder,
        env={**clean, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )


def started(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("started.*"))]


def test_command_for_one_gpu_runs_in_a_process_for_each(tmp_path: Path) -> None:
    done = run(tmp_path, "--gpus", "2", "--", sys.executable, "-O", "train.py", "--rank", "8")
    assert done.returncode == 0, done.stderr
    found = started(tmp_path)
    assert [one["RANK"] for one in found] == ["0", "1"]
    for one in found:
        assert (one["LOCAL_WORLD_SIZE"], one["WORLD_SIZE"], one["WANSHIM_PLAN"]) == ("2", "2", "sequence")
        assert (one["arguments"], one["optimized"]) == (["--rank", "8"], 1)


def test_plan_of_the_user_stays(tmp_path: Path) -> None:
    done = run(tmp_path, "--gpus", "2", "--", "train.py", WANSHIM_PLAN="sequence:2")
    assert done.returncode == 0, done.stderr
    assert [one["WANSHIM_PLAN"] for one in started(tmp_path)] == ["sequence:2", "sequence:2"]


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--", tool("accelerate"), "launch", "train.py"], {}, "which starts processes itself. Expected the command"),
        (["--", "train.py"], {"WANSHIM_PLAN": "pipeline"}, "--gpus 2 and WANSHIM_PLAN=pipeline"),
        (["--", "train.py"], {"WANSHIM_DEVICES": "cuda:0,cuda:1"}, "--gpus 2 and WANSHIM_DEVICES"),
        (["-f", "none", "--", "train.py"], {}, "no selected feature trains one sample on all of them"),
    ],
    ids=["launcher", "plan", "devices", "feature"],
)
def test_contradiction_ends_with_two_before_anything_starts(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], said: str
) -> None:
    done = run(tmp_path, "--gpus", "2", *arguments, **variables)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert not started(tmp_path)


def test_more_processes_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wanshim import gpus
    from wanshim.cli.gpu_processes import per_gpu
    from wanshim.errors import SettingInvalid

    monkeypatch.setattr(gpus, "in_sight", lambda: 2)
    monkeypatch.delenv("WANSHIM_PLAN", raising=False)
    with pytest.raises(SettingInvalid, match="at most the 2 GPUs in sight"):
        per_gpu(["train.py"], 4, None)
