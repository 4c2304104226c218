"""`tools/prove.py` on a user's training script: one step with what is kept, one without, compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.roads.roads import CHECKPOINTING, ROOT, TRAIN, travel
from tools import prove as proof
from wanshim.demo import wan_checkpoint

PROVE = f"python {ROOT}/tools/prove.py -- python train.py ..."


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(580)
def test_step_with_what_is_kept_is_the_step_without_and_nothing_is_trained(tmp_path: Path) -> None:
    wan_checkpoint.write(tmp_path / "checkpoint")
    said = travel(PROVE, TRAIN + CHECKPOINTING, tmp_path / "run", tmp_path / "checkpoint", on_cpu=True)
    lines = said.said.splitlines()
    begin = lines.index("one optimizer step with WANSHIM_KEEP=blocks beside one with WANSHIM_KEEP=off:")
    losses, gradients, weights = lines[begin + 1 : begin + 4]
    assert losses == "  losses: 1, equal bit for bit"
    assert gradients.endswith(", equal bit for bit")
    assert int(gradients.split()[1].rstrip(",")) == int(weights.split()[4].rstrip(",")) > 10
    assert not list(said.folder.glob("out/*.safetensors"))  # it ends behind the step


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.timeout(580)
def test_step_over_two_ranks_is_the_step_without_what_is_kept(tmp_path: Path) -> None:
    wan_checkpoint.write(tmp_path / "checkpoint")
    command = PROVE.replace("prove.py", "prove.py --gpus 2")
    said = travel(command, TRAIN + CHECKPOINTING, tmp_path / "run", tmp_path / "checkpoint", on_cpu=True).said
    assert "one optimizer step with WANSHIM_KEEP=blocks beside one with WANSHIM_KEEP=off:\n  losses: 1, equal" in said
    assert said.count(", equal bit for bit") == 3


def test_each_step_is_run_with_the_options_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one above is that command; here are the processes that it starts."""
    started: list[tuple[list[str], str]] = []

    def start(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        started.append((command[3:], env["WANSHIM_KEEP"]))
        torch.save(step(), env[proof.STEP_FILE])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(proof.subprocess, "run", start)
    assert proof.prove(["python", "train.py"], "diffsynth", 2, "auto", print)
    run = ["run", "--no-report", "--gpus", "2", "-f", "diffsynth", "--", "python", "train.py"]
    assert started == [(run, "blocks"), (run, "off")]


def step(loss: float = 1.0, state: str = "exercised") -> dict[str, Any]:
    parts = {part: [torch.full((2,), loss), torch.ones(3)] for part in proof.PARTS}
    return {**parts, "outcomes": {proof.KEPT: [state, f"{state}, 1 calls"]}}


def prove(monkeypatch: pytest.MonkeyPatch, *steps: dict[str, Any]) -> tuple[bool, list[str]]:
    """Over recorded steps: no feature of ours gives other bits than the framework."""
    left, lines = list(steps), []
    monkeypatch.setattr(proof, "_step", lambda *_: left.pop(0))
    return proof.prove(["train.py"], None, None, "auto", lines.append), lines


def test_difference_is_counted_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    same, lines = prove(monkeypatch, step(1.5), step(), step())
    assert not same
    assert lines[1] == "  losses: 2, 1 differ, by 5.0e-01 of their norm at most"


def test_command_that_differs_from_itself_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(proof.ProofFailed, match="two runs of this command without what is kept differ"):
        prove(monkeypatch, step(1.5), step(), step(1.25))


def test_what_was_not_kept_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(proof.ProofFailed, match=r"had no effect, .* is ineffective, 1 calls"):
        prove(monkeypatch, step(state="ineffective"), step())
