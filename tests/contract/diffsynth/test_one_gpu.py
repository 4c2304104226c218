"""Training on one GPU: accelerate's device has no index there, and every plan names `cuda:0`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import wanshim
from tests.contract.diffsynth import video_job
from tests.one_gpu import one_gpu  # noqa: F401, a fixture
from wanshim.launch import start

SPLIT, KEPT = "diffsynth.model_split", "diffsynth.kept_attention"
RUNS = {
    "attention": {"KEEP": "attention"},
    "blocks": {"KEEP": "blocks"},
    "auto": {"PLAN": "auto"},
    "stream": {"PLAN": "stream"},
    "base": {"PLAN": "auto", "BASE": "int8"},
}


def test_functions_that_want_an_index_insist_on_one(one_gpu: torch.device) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="with a specified index"):
        torch.cuda.get_per_process_memory_fraction(one_gpu)
    assert torch.cuda.get_per_process_memory_fraction("cuda:0") == 1.0


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    "variables",
    [pytest.param(given, id=name) for name, given in RUNS.items()],
)
def test_run_on_one_gpu_plans_for_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"WANSHIM_{name}", value)
    wanshim.activate()
    video_job.train(tmp_path)
    said = "\n".join(note for row in wanshim.report(strict=False).rows for note in row.notes)
    assert "cuda:0" in said
    assert not re.search(r"cuda\b(?!:0)", said)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.usefixtures("one_gpu")
def test_planned_run_of_one_gpu_keeps_blocks_on_a_large_card_and_streams_on_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wanshim run --gpus 1`, by the variables that it sets."""
    for name, value in start.environment(gpus=1).items():
        if name in ("WANSHIM_PLAN", "WANSHIM_DEVICES"):
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)  # three more, which the plan leaves alone
    monkeypatch.setenv("WANSHIM_OFFLOAD", "off")
    monkeypatch.setenv("WANSHIM_CHUNK", "off")

    def notes() -> str:
        return "\n".join(wanshim.report(strict=False).row(SPLIT).notes)

    wanshim.activate()
    whole = video_job.predicted_bytes(tmp_path, monkeypatch, None)
    wanshim.deactivate()
    wanshim.activate()
    large, _ = video_job.train(tmp_path / "large")
    assert "plan: resident. " in notes()
    assert "the last 4 blocks are not computed again in backward, bit for bit the same" in notes()
    wanshim.deactivate()
    wanshim.activate()
    video_job.limit(monkeypatch, whole - 1)
    small, _ = video_job.train(tmp_path / "small")
    assert "plan: stream. " in notes()
    assert large == small
