"""A training on a GPU that is killed and goes on, by the user's own command: the run that was never stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.contract.diffsynth.resume_job import files, seen

ROOT = Path(__file__).parents[3]
GPUS = ("--gpus", "1")


def start(folder: Path, gpus: tuple[str, ...], variables: dict[str, str], **job: object) -> tuple[int, str]:
    """Exit status and standard error of one attempt."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": paths}
    given = json.dumps({"sizes": {"layers": 6, "heads": 4}, **job})
    command = [sys.executable, "-m", "tests.contract.diffsynth.resume_job", str(folder), given]
    found = subprocess.run(
        [sys.executable, "-m", "wanshim", "run", *gpus, "--", *command],
        cwd=ROOT, env={**clean, **deterministic, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.returncode, found.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize(
    ("gpus", "variables", "says"),
    [
        pytest.param((), {}, "", marks=pytest.mark.gpu(1), id="resident"),
        pytest.param((), {"WANSHIM_PLAN": "stream:3"}, "streaming 3 of 6", marks=pytest.mark.gpu(1), id="stream"),
        pytest.param(GPUS, {}, "", marks=pytest.mark.gpu(1), id="--gpus 1"),
        pytest.param(GPUS, {"WANSHIM_PLAN": "stream:3"}, "streaming 3", marks=pytest.mark.gpu(1), id="--gpus 1 stream"),
    ],
)
def test_ended_training_goes_on_with_the_losses_draws_and_files_of_the_undisturbed_one(
    tmp_path: Path, gpus: tuple[str, ...], variables: dict[str, str], says: str, end: str
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    status, said = start(whole, gpus, variables)
    assert status == 0, said[-4000:]
    resume = {**variables, "WANSHIM_RESUME": "auto", "WANSHIM_SAVE_EVERY": "1"}
    status, said = start(out, gpus, resume, at=9, end=end)
    assert status in (75, 128 + signal.SIGKILL, -signal.SIGKILL), said[-4000:]
    status, said = start(out, gpus, resume, attempt=1, seed=99)
    assert status == 0, said[-4000:]
    assert "goes on from step" in said
    assert says in said
    expected, resumed = seen(whole, 0, 0), seen(out, 0, 1)
    assert 0 < len(resumed) <= 7
    assert resumed == expected[-len(resumed) :]
    assert files(out) == files(whole)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(first, then, marks=pytest.mark.gpu(max(int(first), int(then))), id=f"{first} then {then} GPUs")
        for first, then in ("22", "21", "12", "44", "41", "42", "14", "24")
    ],
)
def test_run_on_some_gpus_that_is_killed_goes_on_on_others(tmp_path: Path, first: str, then: str) -> None:
    """One sample a step, so that any number of GPUs makes the same steps: up to rounding, on as many bit for bit."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    status, said = start(whole, ("--gpus", first), {})
    assert status == 0, said[-4000:]
    resume = {"WANSHIM_RESUME": "auto", "WANSHIM_SAVE_EVERY": "1"}
    status, said = start(out, ("--gpus", first), resume, at=9, end="SIGKILL")
    assert status != 0, said[-4000:]
    status, said = start(out, ("--gpus", then), resume, attempt=1, seed=99)
    assert status == 0, said[-4000:]
    assert "goes on from step" in said
    expected, resumed = seen(whole, 0, 0), seen(out, 0, 1)
    assert 0 < len(resumed) <= 7
    if first == then:
        assert resumed == expected[-len(resumed) :]
        assert files(out) == files(whole)
        return
    assert [each[:2] for each in resumed] == [each[:2] for each in expected[-len(resumed) :]]
    losses = [torch.tensor([each[2] for each in run[-len(resumed) :]]) for run in (resumed, expected)]
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
