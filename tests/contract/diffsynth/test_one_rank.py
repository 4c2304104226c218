"""Code of one rank in a job whose ranks train each sample together: accelerate's collectives, a validation on the main
process, folders that each rank names or makes for itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.command_line import wanshim
from wanshim.demo import wan_checkpoint

ROOT = Path(__file__).parents[3]
ARGUMENTS = (
    "--height 32 --width 48 --num_frames 5 --dtype float32 --samples 4 --learning_rate 1e-3 "
    "--use_gradient_checkpointing"
)


def trained(folder: Path, ranks: int, **variables: str) -> tuple[str, list[dict[str, Any]]]:
    """The command's own output, and what each rank saw."""
    wan_checkpoint.write(folder / "checkpoint")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH", "")]))
    done = wanshim(
        *("run", "--gpus", str(ranks), "--", sys.executable, "-m", "tests.contract.diffsynth.one_rank_job"),
        *(str(folder), *ARGUMENTS.split()),
        folder=folder,
        variables={**clean, **cpu, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", **variables},
        timeout_s=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr, [json.loads((folder / f"seen.{rank}.json").read_text()) for rank in range(ranks)]


def check_world(seen: list[dict[str, Any]], groups: int) -> None:
    size = len(seen) // groups
    for rank, one in enumerate(seen):
        first = seen[rank // size * size]
        losses = [seen[group * size]["loss"] for group in range(groups)]
        assert one["loss"] == first["loss"]
        assert one["reduced"] == pytest.approx([sum(step) / groups for step in zip(*losses, strict=True)], rel=1e-5)
        assert one["gathered"] == one["objects"] == [list(step) for step in zip(*losses, strict=True)]
        assert one["split"] == list(range(8))[rank // size * 8 // groups :][: 8 // groups]
        assert one["processes"] == [groups, rank, rank == 0]
        assert one["ranks"] == len(seen)
        assert one["names"] == seen[0]["names"]
    assert [one.get("validated", 0) for one in seen] == [len(seen[0]["loss"]), *[0] * (len(seen) - 1)]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, *trained(folder, 2, WANSHIM_PROGRESS_DIR="logs", WANSHIM_VAE_MODE="auto")


@pytest.mark.slow
def test_accelerate_counts_one_process_a_group_in_all_it_does(of_two: tuple[Path, str, list[dict[str, Any]]]) -> None:
    check_world(of_two[2], groups=1)


@pytest.mark.slow
def test_folder_that_ranks_name_differently_is_the_first_one_s_and_made_once(
    of_two: tuple[Path, str, list[dict[str, Any]]],
) -> None:
    folder, said, _ = of_two
    assert "the ranks name different folders as the run's output: made/first, made/" in said
    assert [path.name for path in (folder / "made").iterdir()] == ["first"]
    assert len(list((folder / "logs").iterdir())) == 1
    assert (folder / "made" / "first" / "epoch-0.safetensors").exists()


@pytest.mark.slow
@pytest.mark.sweep
def test_collectives_of_two_groups_are_those_of_two_processes(tmp_path: Path) -> None:
    check_world(trained(tmp_path, 4, WANSHIM_PLAN="sequence:2")[1], groups=2)
