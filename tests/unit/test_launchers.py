"""How many processes a launcher's command starts, read from the command and the installed launcher's source."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanshim.launch import gpus
from wanshim.launch.interpreter_options import STARTING_PROCESSES
from wanshim.launch.launchers import LAUNCHERS, Launch, launch_of
from wanshim.patching.probe import SourceTree

needs_accelerate = pytest.mark.skipif(SourceTree.of_installed("accelerate").root is None, reason="no accelerate here")
needs_torch = pytest.mark.skipif(SourceTree.of_installed("torch").root is None, reason="no torch here")


@pytest.fixture(autouse=True)
def nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("PET_NPROC_PER_NODE", raising=False)


@needs_torch
def test_each_launcher_is_found_behind_a_wrapper() -> None:
    assert set(STARTING_PROCESSES) == set(LAUNCHERS)
    launch = launch_of(["uv", "run", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"])
    assert launch is not None
    assert launch.processes == 2


@needs_torch
@pytest.mark.parametrize(
    ("command", "launches"),
    [
        ("uv run --extra gpu torchrun t.py", True),
        ("uv run --extra torchrun torchrun t.py", True),
        ("uv run --extra torchrun python t.py", False),
        ("uv run -m pkg.train torchrun t.py", False),
        ("nohup uv run --module torch.distributed.run t.py", True),
        ("numactl -m 0 torchrun t.py", True),
    ],
)
def test_values_of_a_wrapper_and_arguments_of_a_program_are_no_launcher(command: str, *, launches: bool) -> None:
    assert (launch_of(command.split()) is not None) is launches


def found(command: str) -> Launch:
    launch = launch_of(command.split())
    assert launch is not None
    return launch


@needs_accelerate
@pytest.mark.parametrize(
    ("command", "prepared"),
    [
        ("accelerate launch train.py", "accelerate launch --num_processes 1 train.py"),
        ("/accelerate launch -m a --num_processes 2", "/accelerate launch --num_processes 1 -m a --num_processes 2"),
        ("accelerate-launch --dynamo_mode default t", "accelerate-launch --num_processes 1 --dynamo_mode default t"),
        ("python -m accelerate.commands.launch t.py", "python -m accelerate.commands.launch --num_processes 1 t.py"),
        ("env A=1 accelerate launch t.py", "env A=1 accelerate launch --num_processes 1 t.py"),
        ("uv run -q accelerate launch t.py", "uv run -q accelerate launch --num_processes 1 t.py"),
        (
            "uv run --with accelerate accelerate launch t.py",
            "uv run --with accelerate accelerate launch --num_processes 1 t.py",
        ),
        ("uv run -m accelerate.commands.launch t", "uv run -m accelerate.commands.launch --num_processes 1 t"),
        ("env -u A accelerate-launch t.py", "env -u A accelerate-launch --num_processes 1 t.py"),
        ("accelerate launch --num_machines 2 t.py", "accelerate launch --num_processes 2 --num_machines 2 t.py"),
    ],
)  # fmt: skip
def test_accelerate_without_a_number_can_be_given_one_process_a_machine(command: str, prepared: str) -> None:
    launch = found(command)
    assert (launch.processes, launch.is_default) == (None, True)
    assert launch.with_one_process() == prepared.split()


@needs_accelerate
@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ("accelerate launch --num_processes 3 t.py", 3),
        ("accelerate launch --mixed_precision bf16 --num-processes=4 t.py", 4),
        ("accelerate launch --quiet --num_processes 2 --num_machines 2 t.py", 1),
        ("python -X dev -m accelerate.commands.accelerate_cli launch --num_processes 2 t.py", 2),
        ("accelerate launch --num_processes many t.py", None),
    ],
)
def test_number_given_to_accelerate_is_that_of_this_machine(command: str, processes: int | None) -> None:
    launch = found(command)
    assert launch.processes == processes or launch.is_default


@needs_accelerate
@pytest.mark.parametrize(
    ("text", "processes"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", 2),
        ("distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2\n", 2),
        ("distributed_type: 'NO'\n", 1),
        ("distributed_type: MULTI_GPU\n", None),
        ('{"distributed_type": "MULTI_GPU", "num_processes": 8}', 8),
    ],
)
def test_configuration_gives_the_number_where_the_command_does_not(
    tmp_path: Path, text: str, processes: int | None
) -> None:
    (tmp_path / "own.yaml").write_text(text)
    own = found(f"accelerate launch --config_file {tmp_path}/own.yaml t.py")
    assert (own.processes, own.is_default) == (processes, False)
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(text)
    assert found("accelerate launch t.py").processes == processes
    assert found("accelerate launch --cpu t.py").is_default
    assert found("accelerate launch --num_processes 5 t.py").processes in (5, 3)  # over one machine or two


@needs_accelerate
@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ("--use_fsdp --num_processes 2", "FSDP"),
        ("--use_deepspeed", "DeepSpeed"),
        ("--config_file {}/fsdp.yaml", "FSDP"),
        ("--config_file {}/fsdp.yaml --use_deepspeed", "DeepSpeed"),
        ("--config_file {}/fsdp.yaml --multi_gpu", None),
        ("--config_file {}/fsdp.yaml --cpu", None),
        ("--num_processes 2", None),
    ],
)
def test_engine_is_read_from_the_command_else_from_the_configuration(
    tmp_path: Path, options: str, engine: str | None
) -> None:
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\n")
    assert found(f"accelerate launch {options.format(tmp_path)} t.py --use_fsdp").engine == engine


@needs_accelerate
def test_unreadable_configuration_is_left_to_accelerate(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_bytes(b"\xff: [")
    assert found(f"accelerate launch --config_file {tmp_path}/own.yaml t.py").is_default


@needs_accelerate
@pytest.mark.parametrize(("in_sight", "processes"), [(4, 4), (1, 2), (0, 2), (None, 2)])
def test_multi_gpu_is_a_process_a_gpu_and_two_at_least(
    monkeypatch: pytest.MonkeyPatch, in_sight: int | None, processes: int
) -> None:
    monkeypatch.setattr(gpus, "in_sight", lambda: in_sight)
    launch = found("accelerate launch --multi_gpu t.py")
    assert (launch.processes, launch.is_default) == (processes, False)


@needs_torch
@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ("torchrun --nproc-per-node 2 --standalone t.py", 2),
        ("torchrun --standalone t.py --nproc_per_node 3", 1),
        ("python -m torch.distributed.run --nproc_per_node=4 t.py", 4),
        ("torchrun --nproc_per_node gpu t.py", 6),
    ],
)
def test_torchruns_number_is_read_before_the_script_only(
    monkeypatch: pytest.MonkeyPatch, command: str, processes: int
) -> None:
    monkeypatch.setattr(gpus, "in_sight", lambda: 6)
    assert found(command).processes == processes
    assert not found(command).is_default


@needs_torch
def test_torchruns_own_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    assert found("torchrun t.py").processes == 3


@pytest.mark.parametrize(
    "command", ["python train.py", "accelerate config", "python -c accelerate launch", "sh -c accelerate", "python"]
)
def test_other_commands_are_no_launch(command: str) -> None:
    assert launch_of(command.split()) is None
