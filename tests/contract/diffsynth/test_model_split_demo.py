"""`wanshim demo` on the CPU: a LoRA trained by a split, by two processes together, and by one that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHORT = ("--frames", "5", "--steps", "1")


def demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "wanshim", "demo", *options],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.sweep
@pytest.mark.slow
def test_losses_and_lora_of_the_split_are_those_of_one_process(tmp_path: Path) -> None:
    done = demo(tmp_path, *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "split into 2 stages" in done.stdout
    assert "160 of 160 equal bit for bit" in done.stdout
    assert "one process and split agree" in done.stdout


@pytest.mark.slow
@pytest.mark.sweep
def test_losses_of_both_agree_and_the_lora_is_written_once(tmp_path: Path) -> None:
    done = demo(tmp_path, "--plan", "sequence", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sequence parallel over 2 ranks" in done.stdout
    assert "one process and sequence agree" in done.stdout


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(600)  # two trainings, one of them twice, each in a new interpreter
def test_killed_training_goes_on_and_agrees_with_the_undisturbed_one(tmp_path: Path) -> None:
    done = demo(tmp_path, "resume", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goes on from step" in done.stdout
    assert "160 of 160 tensors equal bit for bit" in done.stdout
    assert "the resumed training and the undisturbed one agree" in done.stdout


@pytest.mark.parametrize("options", [("--plan", "ddp"), ("--plan", "sequence", "--devices", "cpu,cpu")])
def test_options_that_contradict_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = demo(tmp_path, *options, *SHORT)
    assert done.returncode == 2
    assert "Expected" in done.stderr
    assert not (tmp_path / "demo-output").exists()
