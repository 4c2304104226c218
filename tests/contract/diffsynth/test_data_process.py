"""The stage that encodes a data set, under `wanshim run --gpus`: what several processes are for there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract.command_line import wanshim
from wanshim.process_report import TRAINED_NOTHING

pytest.importorskip("diffsynth.diffusion.runner", reason="DiffSynth 1 has no such stage")
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

# As examples/wanvideo/model_training/train.py calls it; a parameter that would train brings DDP in, which has a buffer.
ENCODE = """
import sys, types
import torch, accelerate
from diffsynth.diffusion.logger import ModelLogger
from diffsynth.diffusion.runner import launch_data_process_task

class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
    def forward(self, data):
        return {"number": data, "encoded": self.weight * data - self.mean}

launch_data_process_task(
    accelerate.Accelerator(), list(range(int(sys.argv[1]))), Encoder(), ModelLogger("cache"),
    args=types.SimpleNamespace(
        dataset_num_workers=0, enable_model_cpu_offload=False, enable_optimizer_cpu_offload=False,
        cpu_offload_split_threshold=None,
    ),
)
"""


def numbers(folder: Path) -> list[list[int]]:
    """Of the samples, by process."""
    import torch

    load = torch.load
    return [
        [load(file, weights_only=True)["number"] for file in sorted(process.glob("*.pth"))]
        for process in sorted((folder / "cache").iterdir())
    ]


@pytest.mark.parametrize(
    ("gpus", "samples", "expected"),
    [
        (2, 5, [[0, 2, 4], [1, 3]]),
        pytest.param(3, 1, [[0]], marks=pytest.mark.sweep),
        pytest.param(1, 2, [[0, 1]], marks=pytest.mark.sweep),
    ],
    ids=["uneven", "fewer samples than ranks", "one process"],
)
def test_each_sample_is_encoded_once_which_is_said_and_passes_strict(
    tmp_path: Path, gpus: int, samples: int, expected: list[list[int]]
) -> None:
    (tmp_path / "train.py").write_text(ENCODE)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    variables = {**clean, **cpu, "GLOO_SOCKET_IFNAME": "lo", "WANSHIM_STRICT": "1"}
    done = wanshim(
        "run", "--gpus", str(gpus), "--", "train.py", str(samples), folder=tmp_path, variables=variables, timeout_s=200
    )
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path) == expected
    said = f"{gpus} processes encoded {samples} samples, this one" if gpus > 1 else f"1 process encoded {samples}"
    assert f"wanshim: diffsynth.model_split: {said}" in done.stderr
    assert "diffsynth.model_split exercised, 1 call of launch_data_process_task" in done.stderr
    assert TRAINED_NOTHING not in done.stderr
