"""The page in a real Chromium beside a live DiffSynth job: two ranks of `accelerate launch` on gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract import page as looking
from tests.contract.launching import tool
from wanshim.core.training.progress_log import run_folder
from wanshim.demo import wan_checkpoint

ROOT = Path(__file__).parents[3]
STEPS = 2000
NONE = "\N{EN DASH}"
LAUNCHER = ["launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "--num_machines", "1"]
LAUNCHER += ["--mixed_precision", "no", "--dynamo_backend", "no"]


class LiveJob:
    """A LoRA job of 2 x 2000 micro-batches that nobody expects to end."""

    def __init__(self, checkpoint: Path, folder: Path, log_folder: Path) -> None:
        self.logs = run_folder(log_folder, folder / "lora")
        self.output = folder / "job.txt"
        command = [sys.executable, "-m", "wanshim", "run", "-f", "diffsynth.progress", "--"]
        command += [tool("accelerate"), *LAUNCHER, "-m", "tests.contract.diffsynth.progress_job"]
        command += ["--checkpoint", str(checkpoint), "--output", str(folder / "lora"), "--accumulation", "3"]
        command += ["--samples", str(2 * STEPS), "--seconds", "0.05"]
        more = {"WANSHIM_PROGRESS_DIR": str(log_folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        more |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, env=os.environ | more, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_until_it_steps(self) -> None:
        def steps() -> bool:
            assert self.process.poll() is None, self.output.read_text()[-4000:]
            return sum('"step"' in path.read_text() for path in self.logs.glob("*.jsonl")) == 2

        looking.wait_until(steps, "no rank made a step")

    def records(self, rank: int) -> list[dict[str, Any]]:
        whole = next(self.logs.glob(f"rank-{rank:05d}.*.jsonl")).read_bytes().rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def job(tmp_path: Path, logs: Path) -> Iterator[LiveJob]:
    checkpoint = tmp_path / "checkpoint"
    wan_checkpoint.write(checkpoint)
    started = LiveJob(checkpoint, tmp_path, logs)
    yield started
    started.end()


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_page_follows_a_live_job_and_shows_its_killed_rank(browser: Any, logs: Path, job: LiveJob) -> None:
    job.wait_until_it_steps()
    with looking.serving(logs) as url:
        page = looking.open_page(browser, url)
        first = looking.wait_for_points(page, 3)
        assert looking.wait_for_points(page, first + 10) > first + 10
        page.wait_for_selector(".state[data-state=running]")
        assert looking.ink(page) > 500
        assert re.fullmatch(rf"\d+ / {STEPS}", page.inner_text("[data-figure=step]"))
        assert re.fullmatch(r"\d+:\d\d:\d\d", page.inner_text("[data-figure=ETA]"))
        logged = {record["step"]: record["loss"] for record in job.records(0) if "event" not in record}
        drawn = looking.curve(page)
        assert drawn["loss"] == [logged[step] for step in drawn["x"]]

        pid = job.records(1)[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        row = looking.row_of(page, 1)
        row.locator("td[data-state=gone]").wait_for()
        assert f"rank 1 (process {pid}) is gone" in page.inner_text(".problems")
        # The launcher ends the other rank, which may notice its lost peer before.
        assert page.inner_text(".run .state") in ("gone", "failed")
        assert page.inner_text("[data-figure=ETA]") == NONE
        command = [sys.executable, "-m", "wanshim", "monitor", str(job.logs.parent), "--check"]
        check = subprocess.run(command, capture_output=True, text=True)
        assert check.returncode == 1
        assert f"gone: rank 1 (process {pid}) is gone" in check.stdout
        assert page.foreign == []
        assert page.faults == []
