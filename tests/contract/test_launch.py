"""`accelerate launch` and torchrun on a machine of two GPUs: a split that was named is had, or nothing starts.

The launchers are the real ones; only the number of GPUs that torch shows them is made up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.command_line import wanshim
from tests.contract.launching import tool

# Only accelerate's own Python asks torch: neither `wanshim run` nor the training script imports it here.
TWO_GPUS = """
import sys
if "wanshim" not in sys.orig_argv and any("accelerate" in part for part in sys.orig_argv):
    import torch
    torch.cuda.device_count = lambda: 2
    torch.cuda.is_available = lambda: True
"""
SCRIPT = """
import os, sys, wanshim
rank, count = os.environ.get("LOCAL_RANK", "0"), os.environ.get("LOCAL_WORLD_SIZE", "1")
{activate}
open(f"started.{{rank}}", "w").write(f"{{count}} {{wanshim.report().row('diffsynth.model_split').selected_by}}")
"""
# No DeepSpeed is needed until accelerate has said how it would start it.
DEEPSPEED = {
    "deepspeed/__init__.py": "",
    "deepspeed/launcher/__init__.py": "",
    "deepspeed/launcher/runner.py": "DEEPSPEED_ENVIRONMENT_NAME = '.deepspeed_env'\n",
    "deepspeed-0.18.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.0\n",
}
# As a module it does not import what its other commands need, a second for each start.
ACCELERATE_LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
SENTENCE = "A split is one process over all its GPUs; 2 were started for 2 devices: add --num_processes 1"


class Machine:
    """A folder with `train.py`, and commands run in it with two GPUs in torch's sight."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "start").mkdir()
        (folder / "start" / "sitecustomize.py").write_text(TWO_GPUS)
        self.write_script()

    def write_script(self, activate: str = "") -> None:
        (self.folder / "train.py").write_text(SCRIPT.format(activate=activate))

    def run(self, *command: str, by_wanshim: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        paths = [str(self.folder / "start"), str(Path(__file__).parents[2])]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(self.folder), "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"OMP_NUM_THREADS": "1", "WANSHIM_DEVICES": "cpu,cpu", **variables}
        if by_wanshim:
            return wanshim("run", "--", *command, folder=self.folder, variables=environment)
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    @property
    def started(self) -> dict[str, str]:
        """What each process wrote when it came past `import wanshim`, by local rank."""
        return {path.suffix[1:]: path.read_text() for path in sorted(self.folder.glob("started.*"))}


def the_line_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of ours; a launcher may have said something before."""
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("wanshim: "))
    return line


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.sweep
@pytest.mark.slow
def test_accelerate_without_a_number_of_processes_starts_one_over_all_devices(machine: Machine) -> None:
    done = machine.run(tool("accelerate"), "launch", "train.py", "--num_processes", "2")  # the script's own option
    assert done.returncode == 0, done.stderr
    assert machine.started == {"0": "1 WANSHIM_DEVICES"}
    said = [line for line in done.stderr.splitlines() if " added: " in line]
    assert said == [
        "wanshim: --num_processes 1 added: accelerate would start a process for each GPU, and a split is one over all"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "strict"),
    [
        ((tool("accelerate"), "launch", "--num_processes", "2", "train.py"), "0"),
        pytest.param((*ACCELERATE_LAUNCH, "--num-processes=2", "train.py"), "1", marks=pytest.mark.sweep),
        pytest.param((tool("accelerate"), "launch", "--multi_gpu", "train.py"), "0", marks=pytest.mark.sweep),
        ((tool("torchrun"), "--nproc-per-node", "2", "train.py"), "1"),
        pytest.param(
            (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"),
            "0",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            ("nohup", "env", "A=1", tool("torchrun"), "--nproc-per-node", "2", "train.py"),
            "0",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            ("sh", "-c", f"{tool('torchrun')} --nproc-per-node 2 train.py; exit $?"), "0", marks=pytest.mark.sweep
        ),
    ],
    ids=["accelerate", "module", "multi_gpu", "torchrun", "torch.distributed.run", "nohup", "shell"],
)
def test_number_of_processes_that_contradicts_the_split_ends_with_two_before_the_launcher_starts_anything(
    machine: Machine, command: tuple[str, ...], strict: str
) -> None:
    done = machine.run(*command, WANSHIM_STRICT=strict)
    assert (done.returncode, done.stdout, machine.started) == (2, "", {})
    assert the_line_of(done).startswith(f"wanshim: {SENTENCE} (torchrun: --nproc_per_node 1)")


@pytest.mark.sweep
@pytest.mark.slow
def test_number_in_accelerates_configuration_that_contradicts_the_split_ends_with_two(machine: Machine) -> None:
    (machine.folder / "two.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    (machine.folder / "accelerate").mkdir()
    (machine.folder / "accelerate" / "default_config.yaml").write_text(
        "distributed_type: MULTI_GPU\nnum_processes: 2\n"
    )
    for options in (["--config_file", "two.yaml"], []):
        done = machine.run(tool("accelerate"), "launch", *options, "train.py")
        assert (done.returncode, machine.started) == (2, {})
        assert SENTENCE in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "variables", "engine"),
    [
        pytest.param(
            ("accelerate", "launch", "--use_fsdp", "train.py"),
            {"WANSHIM_PLAN": "sequence"},
            "FSDP",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            ("accelerate", "launch", "--config_file", "fsdp.yaml", "train.py"),
            {"WANSHIM_PLAN": "stream"},
            "FSDP",
            marks=pytest.mark.sweep,
        ),
        (("accelerate", "launch", "--use_deepspeed", "train.py"), {"WANSHIM_DEVICES": "cpu,cpu"}, "DeepSpeed"),
        pytest.param(
            ("torchrun", "--nproc-per-node", "2", "train.py"),
            {"WANSHIM_PLAN": "sequence"},
            "FSDP",
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["option", "configuration", "deepspeed", "variable"],
)
def test_plan_beside_an_engine_that_places_parameters_ends_with_two_before_the_launcher_starts_anything(
    machine: Machine, command: tuple[str, ...], variables: dict[str, str], engine: str
) -> None:
    (machine.folder / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\n")
    if engine == "DeepSpeed":
        for name, text in DEEPSPEED.items():
            (machine.folder / "start" / name).parent.mkdir(parents=True, exist_ok=True)
            (machine.folder / "start" / name).write_text(text)
    given = {"ACCELERATE_USE_FSDP": "true"} if command[0] == "torchrun" else {}
    done = machine.run(tool(command[0]), *command[1:], **{"WANSHIM_DEVICES": "", **variables, **given})
    assert (done.returncode, done.stdout, machine.started) == (2, "", {})
    line = the_line_of(done)
    (asked,) = variables
    assert line.startswith(f"wanshim: {engine} (--use_{engine.lower()}, ACCELERATE_USE_{engine.upper()}, or ")
    assert f") and {asked} each take over the parameters: leave one of the two out. " in line


@pytest.mark.slow
def test_two_processes_with_a_split_each_start(machine: Machine) -> None:
    done = machine.run(tool("torchrun"), "--nproc-per-node", "2", "train.py", WANSHIM_DEVICES="cpu,cpu,cpu,cpu")
    assert done.returncode == 0, done.stderr
    assert machine.started == {"0": "2 WANSHIM_DEVICES", "1": "2 WANSHIM_DEVICES"}


@pytest.mark.sweep
@pytest.mark.slow
def test_plan_of_a_process_a_gpu_leaves_the_launcher_its_default(machine: Machine) -> None:
    done = machine.run(*ACCELERATE_LAUNCH, "train.py", WANSHIM_DEVICES="", WANSHIM_PLAN="stream")
    assert done.returncode == 0, done.stderr
    assert machine.started == {"0": "2 WANSHIM_PLAN", "1": "2 WANSHIM_PLAN"}
    assert "added" not in done.stderr


@pytest.mark.sweep
@pytest.mark.slow
def test_split_of_all_gpus_by_plan_is_one_process_too(machine: Machine) -> None:
    done = machine.run(*ACCELERATE_LAUNCH, "train.py", WANSHIM_DEVICES="", WANSHIM_PLAN="split")
    assert done.returncode == 0, done.stderr
    assert machine.started == {"0": "1 WANSHIM_PLAN"}


@pytest.mark.slow
def test_every_process_of_a_launcher_that_run_cannot_see_ends_before_the_script(machine: Machine) -> None:
    """As one that is no Python: nothing is known of it before its processes come up."""
    names = "RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 LOCAL_WORLD_SIZE=2"
    done = machine.run("sh", "-c", f"for r in 0 1; do {names} {sys.executable} train.py || exit; done")
    assert done.returncode != 0
    assert machine.started == {}
    assert SENTENCE in done.stderr


@pytest.mark.sweep
@pytest.mark.slow
def test_activate_in_the_script_raises_in_every_process(machine: Machine) -> None:
    machine.write_script("wanshim.activate()")
    done = machine.run(tool("torchrun"), "--nproc-per-node", "2", "train.py", by_wanshim=False)
    assert done.returncode != 0
    assert machine.started == {}
    assert f"wanshim.errors.FeatureUnavailable: {SENTENCE}" in done.stderr
