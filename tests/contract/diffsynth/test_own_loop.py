"""A loop that is not `launch_training_task`, or a model that is not known, never trains otherwise in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffsynth.diffusion import runner

import wanshim
from tests.contract.diffsynth.training import FEATURE, Logger, Pipe, Samples, Training, wan_pipe
from wanshim.errors import FeatureUnavailable

ROOT = Path(__file__).parents[3]
OWN_LOOP = """
import torch
from accelerate import Accelerator
import diffsynth.diffusion.runner
from tests.contract.diffsynth.training import Samples, Training

module, accelerator = Training(), Accelerator(cpu=True)
optimizer = torch.optim.AdamW(module.trainable_modules())
loader = torch.utils.data.DataLoader(Samples(2), collate_fn=lambda batch: batch[0])
module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
for sample in loader:
    accelerator.backward(module(sample))
    optimizer.step()
print("trained")
"""


def own_loop() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(weight, torch.zeros(2))


def notes() -> str:
    return "\n".join(wanshim.report(strict=False).row(FEATURE).notes)


@pytest.mark.parametrize("plan", ["sequence", "sequence:2"])
def test_sequence_ends_a_loop_of_ones_own_before_a_weight_changes(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", plan)
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(FeatureUnavailable, match="WANSHIM_PLAN=sequence has no effect on this training loop"):
        own_loop()


@pytest.mark.parametrize("plan", ["stream", "auto", "pipeline"])
def test_other_plans_say_that_they_have_no_effect_and_strict_ends_them(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", plan)
    wanshim.activate(f"none,{FEATURE}")
    own_loop()
    own_loop()
    assert notes().count(f"left to the framework: WANSHIM_PLAN={plan} has no effect on this training loop") == 1
    assert wanshim.report(strict=False).row(FEATURE).violation is not None
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.deactivate()
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(FeatureUnavailable, match="launch_training_task"):
        own_loop()


def test_loop_of_ones_own_over_a_split_and_without_a_plan_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANSHIM_DEVICES", "cpu,cpu")
    wanshim.activate(f"none,{FEATURE}")
    own_loop()
    monkeypatch.setenv("WANSHIM_PLAN", "sequence")
    wanshim.deactivate()
    own_loop()
    assert not notes()


@pytest.mark.parametrize(
    ("feature", "variable", "value"),
    [
        ("resume", "RESUME", "auto"),
        ("kept_attention", "KEEP", "attention"),
        ("kept_attention", "KEEP", "blocks"),
        ("kept_attention", "KEEP", "auto"),
        ("checkpoint_offload", "OFFLOAD", "on"),
        ("compiled_blocks", "COMPILE", "1"),
        ("progress", "PROGRESS_DIR", "logs"),
    ],
)
def test_what_is_done_in_a_planned_run_alone_says_so_in_a_loop_of_ones_own_and_strict_ends_it(
    feature: str, variable: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feature, said = f"diffsynth.{feature}", f"WANSHIM_{variable} has no effect on this training loop"
    wanshim.activate(f"none,{feature}")
    own_loop()
    assert said not in caplog.text
    monkeypatch.setenv(f"WANSHIM_{variable}", value)
    wanshim.activate(f"none,{feature}")
    own_loop()
    own_loop()
    assert caplog.text.count(said) == 1
    assert wanshim.report(strict=False).row(feature).violation is not None
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.deactivate()
    wanshim.activate(f"none,{feature}")
    with pytest.raises(FeatureUnavailable, match="launch_training_task"):
        own_loop()
    wanshim.deactivate()
    own_loop()


@pytest.mark.parametrize(
    ("feature", "variable", "value"), [("kept_attention", "KEEP", "blocks"), ("model_split", "PLAN", "stream")]
)
def test_launcher_that_a_script_imported_before_activation_is_named_as_the_reason(
    feature: str, variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = runner.launch_training_task
    monkeypatch.setenv(f"WANSHIM_{variable}", value)
    wanshim.activate(f"none,diffsynth.{feature}")
    captured(Accelerator(), Samples(1), Training(), Logger(tmp_path))
    (note,) = [n for n in wanshim.report(strict=False).row(f"diffsynth.{feature}").notes if "no effect" in n]
    assert "the script imported launch_training_task before wanshim.activate()" in note
    assert "outside" not in note
    monkeypatch.setenv("WANSHIM_STRICT", "1")
    wanshim.deactivate()
    wanshim.activate(f"none,diffsynth.{feature}")
    with pytest.raises(FeatureUnavailable, match=r"Call wanshim\.activate\(\) before the script imports"):
        captured(Accelerator(), Samples(1), Training(), Logger(tmp_path))


@pytest.mark.sweep
@pytest.mark.slow  # the hook above, in the two processes of test_run_on_gpus.py: 20 seconds of imports
def test_script_with_its_own_loop_ends_under_gpus(tmp_path: Path) -> None:
    """As users start it: each process is ended, and the report says why."""
    (tmp_path / "train.py").write_text(OWN_LOOP)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    done = subprocess.run(
        [sys.executable, "-m", "wanshim", "run", "--gpus", "2", "--", sys.executable, "train.py"],
        cwd=tmp_path,
        env={
            **clean,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    assert "--gpus 2 has no effect on this training loop" in done.stderr
    assert "trained" not in done.stdout


def stranger() -> Training:
    """A model of another family."""
    pipe = Pipe(torch.nn.Linear(2, 2), lambda **_: None)
    pipe.dit = type("QwenImageDiT", (torch.nn.Module,), {})()
    return Training(pipe=pipe)


def compiled() -> Training:
    pipe = wan_pipe()
    pipe.dit = torch.compile(pipe.dit)
    return Training(pipe=pipe)


def without_dit() -> Training:
    pipe = wan_pipe()
    pipe.dit = None
    return Training(pipe=pipe)


@pytest.mark.parametrize("plan", ["sequence", "stream", "split", "pipeline"])
@pytest.mark.parametrize(
    ("module", "reason"),
    [(stranger, "QwenImageDiT: not one of Wan or FLUX.2"), (compiled, "torch.compile wraps"), (without_dit, "no pipe")],
)
def test_named_plan_over_an_unknown_model_ends_before_training(
    module: Any, reason: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANSHIM_PLAN", plan)
    wanshim.activate(f"none,{FEATURE}")
    made = module()
    with pytest.raises(FeatureUnavailable, match=rf"WANSHIM_PLAN={plan} cannot train this model: .*{reason}"):
        runner.launch_training_task(Accelerator(), Samples(), made, Logger(tmp_path))
    assert made.seen == []


@pytest.mark.parametrize("base", ["float8", "int8"])
@pytest.mark.parametrize("strict", ["", "1"])
def test_base_that_a_plan_does_not_take_is_refused_before_anything_moves(
    base: str, strict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PLAN": "stream", "BASE": base, "STRICT": strict}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{FEATURE}")
    module = Training()
    monkeypatch.setattr(Training, "to", lambda *args, **kwargs: pytest.fail("the model was moved"))
    with pytest.raises(FeatureUnavailable, match="WANSHIM_BASE: a quantised weight"):
        runner.launch_training_task(Accelerator(), Samples(), module, Logger(tmp_path))


def test_base_under_a_conflict_is_not_dropped_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PLAN": "auto", "BASE": "int8"}.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate(f"none,{FEATURE}")
    with pytest.raises(FeatureUnavailable, match=r"WANSHIM_BASE=int8 cannot train .*--enable_model_cpu_offload"):
        runner.launch_training_task(
            Accelerator(), Samples(), Training(), Logger(tmp_path), args=Namespace(enable_model_cpu_offload=True)
        )
