"""Training on one GPU: accelerate's device has no index there, and every plan names `cuda:0`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import wanshim
from tests.contract.diffsynth import video_job
from tests.one_gpu import one_gpu  # noqa: F401, a fixture

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


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("variables", RUNS.values(), ids=RUNS.keys())
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
