"""`wanshim run --gpus N`: a command for one GPU runs in N processes that train each sample together, or none starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.contract.command_line import wanshim
from tests.contract.launching import tool
from tests.sockets import LOOPBACK, listening
from wanshim.launch import ranks
from wanshim.process_report import TRAINED_NOTHING

SCRIPT = """
import json, os, sys
from pathlib import Path
names = ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "WANSHIM_PLAN")
Path(f"started.{os.environ['RANK']}").write_text(
    json.dumps({"arguments": sys.argv[1:], "optimized": sys.flags.optimize, **{n: os.environ.get(n) for n in names}})
)
"""


def environment(**variables: str) -> dict[str, str]:
    """As a user has it who tries two ranks on the CPU."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return {**clean, **cpu, "GLOO_SOCKET_IFNAME": "lo", **variables}


def run(
    folder: Path, *arguments: str, script: str = SCRIPT, stdin: int | str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    return wanshim("run", *arguments, folder=folder, variables=environment(**variables), stdin=stdin, timeout_s=200)


def two(folder: Path, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script in two ranks."""
    return run(folder, "--gpus", "2", "--", "train.py", *arguments, script=script, **variables)


def started(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("started.*"))]


def test_command_for_one_gpu_runs_in_a_process_for_each(tmp_path: Path) -> None:
    done = run(tmp_path, "--gpus", "2", "--", sys.executable, "-O", "train.py", "--rank", "8")
    assert done.returncode == 0, done.stderr
    found = started(tmp_path)
    assert [one["RANK"] for one in found] == ["0", "1"]
    for one in found:
        assert (one["LOCAL_WORLD_SIZE"], one["WORLD_SIZE"], one["WANSHIM_PLAN"]) == ("2", "2", "sequence")
        assert (one["arguments"], one["optimized"]) == (["--rank", "8"], 1)


def test_program_that_comes_through_a_pipe_is_refused_before_a_rank_waits_for_one_that_has_none(tmp_path: Path) -> None:
    """As bash hands a here-document over; a file is read by each rank."""
    reading, writing = os.pipe()
    os.write(writing, b"print('trained')\n")
    os.close(writing)
    done = run(tmp_path, "--gpus", "2", "--", sys.executable, "-", stdin=reading)
    os.close(reading)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--gpus 2 with a program that comes through a pipe, which one process alone can read." in done.stderr
    done = run(tmp_path, "--gpus", "2", "--", sys.executable, "-", stdin="print('trained')\n")
    assert (done.returncode, done.stdout) == (0, "trained\ntrained\n")


ON_ONE = """
import json, os, sys
names = ("RANK", "WANSHIM_PLAN", "WANSHIM_DEVICES", "PYTORCH_CUDA_ALLOC_CONF")
print(json.dumps({"torch": "torch" in sys.modules, **{name: os.environ.get(name) for name in names}}))
"""


@pytest.mark.parametrize(
    ("variables", "plan", "devices", "allocator"),
    [
        ({}, "auto", "cuda:0", "expandable_segments:True"),
        pytest.param(
            {"WANSHIM_PLAN": "stream:3"}, "stream:3", None, "expandable_segments:True", marks=pytest.mark.slow
        ),
        pytest.param(
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
            *("auto", "cuda:0", "expandable_segments:False"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["auto", "stream", "allocator"],
)
def test_command_on_one_gpu_is_one_planned_process(
    tmp_path: Path, variables: dict[str, str], plan: str, devices: str | None, allocator: str
) -> None:
    done = run(tmp_path, "--gpus", "1", "--", "train.py", script=ON_ONE, **variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("torch") is False
    assert tuple(found.values()) == (None, plan, devices, allocator)


SELECTED = """
import os
import wanshim
if os.environ.get("RANK", "0") == "0":
    print(*(row.selected_by for row in wanshim.report(strict=False).rows if row.feature == "diffsynth.FEATURE"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables", "feature", "selected_by"),
    [
        (["run", "--gpus", "1"], {}, "model_split", "--gpus 1"),
        pytest.param(["run", "--gpus", "2"], {}, "model_split", "--gpus 2", marks=pytest.mark.sweep),
        pytest.param(
            ["run", "--gpus", "1"], {"WANSHIM_PLAN": "stream"}, "model_split", "WANSHIM_PLAN", marks=pytest.mark.sweep
        ),
        (["run"], {"WANSHIM_DEVICES": "cpu,cpu"}, "model_split", "WANSHIM_DEVICES"),
        (["run", "--fast"], {}, "compiled_blocks", "--fast"),
        pytest.param(
            ["run", "--fast"], {"WANSHIM_COMPILE": "1"}, "compiled_blocks", "WANSHIM_COMPILE", marks=pytest.mark.sweep
        ),
        (["generate", "--gpus", "2"], {}, "generate", "--gpus 2"),
    ],
    ids=["one GPU", "two GPUs", "plan", "devices", "fast", "compiled", "generate"],
)
def test_report_names_the_option_that_the_user_wrote_and_no_variable_that_it_set(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], feature: str, selected_by: str
) -> None:
    (tmp_path / "train.py").write_text(SELECTED.replace("FEATURE", feature))
    done = wanshim(*arguments, "--", "train.py", folder=tmp_path, variables=environment(**variables))
    assert (done.returncode, done.stdout.strip()) == (0, selected_by), done.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--", "train.py"], {"ACCELERATE_USE_CPU": ""}, "--gpus 1 with 0 GPUs in sight. Expected a GPU."),
        (["--", "train.py"], {"WANSHIM_PLAN": "sequence"}, "for each GPU: auto, stream."),
        (["--", "train.py"], {"WANSHIM_DEVICES": "cuda:1"}, "--gpus 1 and WANSHIM_DEVICES"),
        (["-f", "none", "--", "train.py"], {}, "no selected feature carries such a plan out"),
    ],
    ids=["no_gpu", "plan", "devices", "feature"],
)
def test_what_one_gpu_cannot_have_ends_with_two_before_anything_starts(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], said: str
) -> None:
    done = run(tmp_path, "--gpus", "1", *arguments, script=ON_ONE, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in " ".join(done.stderr.split())


def test_plan_of_the_user_stays(tmp_path: Path) -> None:
    done = run(tmp_path, "--gpus", "2", "--", "train.py", WANSHIM_PLAN="sequence:2")
    assert done.returncode == 0, done.stderr
    assert [one["WANSHIM_PLAN"] for one in started(tmp_path)] == ["sequence:2", "sequence:2"]


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--", "train.py"], {"WANSHIM_PLAN": "pipeline"}, "--gpus 2 and WANSHIM_PLAN=pipeline"),
        (["--", "train.py"], {"WANSHIM_DEVICES": "cuda:0,cuda:1"}, "--gpus 2 and WANSHIM_DEVICES"),
        (["-f", "none", "--", "train.py"], {}, "no selected feature carries such a plan out"),
    ],
    ids=["plan", "devices", "feature"],
)
def test_contradiction_ends_with_two_before_anything_starts(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], said: str
) -> None:
    done = run(tmp_path, "--gpus", "2", *arguments, **variables)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert not started(tmp_path)


@pytest.mark.parametrize(
    ("variables", "command", "said"),
    [
        ({"ACCELERATE_USE_CPU": ""}, ["train.py"], "--gpus 2 with 0 GPUs in sight. Expected a GPU."),
        ({"WANSHIM_PLAN": "sequence:3"}, ["train.py"], "Expected a number of processes that is a multiple of 3."),
        ({}, ["./steps.sh"], "./steps.sh, a shell script, would run each of its steps once for each GPU."),
        ({}, ["bash", "-c", "python train.py; python train.py"], "--gpus 2 with bash, a shell script"),
        ({}, ["python", "-I", "train.py"], "--gpus 2 with -I, which makes Python pass over wanshim."),
        ({}, ["no-such-program"], "no program 'no-such-program' on PATH."),
    ],
    ids=[
        "no_gpu",
        "groups",
        "steps",
        "shell",
        "isolated",
        "no_program",
    ],
)
def test_what_cannot_train_on_all_gpus_is_one_sentence_before_anything_starts(
    tmp_path: Path, variables: dict[str, str], command: list[str], said: str
) -> None:
    (tmp_path / "steps.sh").write_text("#!/bin/bash\npython train.py\npython train.py\n")
    (tmp_path / "steps.sh").chmod(0o755)
    done = run(tmp_path, "--gpus", "2", "--", *command, **variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("wanshim: ")
    assert said in line
    assert not started(tmp_path)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from wanshim.core.shared import gpus
    from wanshim.errors import SettingInvalid
    from wanshim.launch.gpu_processes import settings_of_ranks

    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(gpus, "in_sight", lambda visible: 2)
    with pytest.raises(SettingInvalid, match=r"--gpus 4 with 2 GPUs in sight\. Expected at most 2"):
        settings_of_ranks(["train.py"], 4, None)


def test_gpus_in_a_rank_of_gpus_are_refused(tmp_path: Path) -> None:
    """Each rank would start ranks of its own."""
    twice = ["--gpus", "2", "--", sys.executable, "-m", "wanshim", "run", "--gpus", "2", "--", "train.py"]
    done = run(tmp_path, *twice)
    assert done.returncode == 2
    assert "--gpus 2 in a rank of another --gpus. Expected the number of GPUs once." in " ".join(done.stderr.split())
    assert not started(tmp_path)


# -- the launcher does not show through ----------------------------------------------------------------


def test_options_of_the_script_reach_it_whatever_they_are_called(tmp_path: Path) -> None:
    options = ["--log", "a", "--n", "2", "--max", "3", "--nnodes", "4", "--help", "--", "-m"]
    done = two(tmp_path, SCRIPT, *options)
    assert done.returncode == 0, done.stderr
    assert [one["arguments"] for one in started(tmp_path)] == [options, options]


MEETS = """
import os, torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
os.write(1, b"%d\\n" % x.item())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_meet_whatever_torchrun_is_told_and_the_launcher_says_nothing(tmp_path: Path) -> None:
    outer = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "7", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5"}
    done = two(tmp_path, MEETS, **outer)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n2\n", f"wanshim: {TRAINED_NOTHING}\n")


def test_port_of_the_ranks_is_none_that_the_kernel_gives_to_others_or_that_somebody_listens_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = ranks.free_port()
    assert found < first_given
    with socket.socket() as server:
        server.bind(("127.0.0.1", found))
        server.listen(1)
        monkeypatch.setattr(ranks, "PORTS", (found, found + 30))
        assert found not in {ranks.free_port() for _ in range(200)}


@pytest.mark.slow
@pytest.mark.parametrize("waits", [0, 60], ids=["ends", "goes_on"])
def test_rank_behind_a_wrapper_that_drops_variables_ends_the_job_and_no_other_is_started(
    tmp_path: Path, waits: int
) -> None:
    wrapper = ["nice", "env", "-u", "PYTHONPATH", sys.executable]  # as sudo does
    script = f"{SCRIPT}\nimport time; time.sleep({waits})"
    done = run(tmp_path, "--gpus", "2", "--", *wrapper, "train.py", script=script)
    assert (done.returncode, len(started(tmp_path))) == (2, 1)
    (line,) = done.stderr.splitlines()
    assert line.startswith("wanshim: --gpus had no effect, no other rank was started: wanshim was ")
    assert "export PYTHONPATH=YOURS:$PYTHONPATH" in line


def test_disabled_job_is_the_program_alone_and_once(tmp_path: Path) -> None:
    names = ("RANK", "WANSHIM_PLAN", "WANSHIM_GENERATE")
    (tmp_path / "train.py").write_text(f"import os; print(*(os.environ.get(name) for name in {names}))")
    for verb in ("run", "generate"):
        command = (verb, "--gpus", "2", "--", "train.py")
        done = wanshim(*command, folder=tmp_path, variables=environment(WANSHIM_DISABLE="1"))
        assert (done.returncode, done.stdout) == (0, "None None None\n")
        assert done.stderr == "wanshim: wanshim is switched off by WANSHIM_DISABLE: --gpus 2 has no effect\n"


# -- what starts processes itself ----------------------------------------------------------------------

TWO = ("--nproc-per-node", "2", "train.py")
SPAWNS = """
import os
import torch.multiprocessing, torch.distributed
def train(rank):
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    open("started.joined", "w").close()
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=3)
"""
DEBUGS = """
import accelerate
def train():
    accelerate.Accelerator(cpu=True)
    open("started.joined", "w").close()
if __name__ == "__main__":
    accelerate.debug_launcher(train, num_processes=3)
"""
NOTEBOOK = """
import os
os.environ.pop("ACCELERATE_USE_CPU")  # with it accelerate starts no process
import accelerate
def train():
    open("started.joined", "w").close()
accelerate.notebook_launcher(train, num_processes=2)
"""


def refused(folder: Path, *command: str, script: str = SCRIPT, **variables: str) -> str:
    """The one sentence with which a command of two ranks ends before a line of its program."""
    done = run(folder, "--gpus", "2", "--", *command, script=script, **variables)
    assert done.returncode == 2, done.stderr
    assert not started(folder)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("wanshim: "))
    assert line.startswith("wanshim: --gpus 2 with ")
    assert "Expected the command that trains on one GPU." in line
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapper",
    [
        [],
        pytest.param(["nohup"], marks=pytest.mark.sweep),
        pytest.param(["timeout", "100"], marks=pytest.mark.sweep),
        pytest.param(["env", "A=1"], marks=pytest.mark.sweep),
        pytest.param(["nice", "sh", "-c", '"$@"; exit $?', "tool"], marks=pytest.mark.sweep),  # as uvx or nsys
    ],
    ids=lambda words: "_".join(words[:2]) or "alone",
)
def test_torchrun_is_refused_behind_whatever_starts_it(tmp_path: Path, wrapper: list[str]) -> None:
    said = refused(tmp_path, *wrapper, tool("torchrun"), *TWO)
    assert "torch's launcher, which starts 2 processes itself" in said


@pytest.mark.slow
def test_module_of_torchrun_is_refused(tmp_path: Path) -> None:
    assert "torch's launcher" in refused(tmp_path, sys.executable, "-m", "torch.distributed.run", *TWO)


@pytest.mark.sweep
@pytest.mark.slow
def test_accelerates_launcher_is_refused_with_what_its_configuration_sets(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("distributed_type: MULTI_CPU\nmixed_precision: bf16\nnum_processes: 2\n"
                                     "num_machines: 1\nuse_cpu: true\n")  # fmt: skip
    said = refused(tmp_path, tool("accelerate"), "launch", "--config_file", "c.yaml", "train.py")
    assert "accelerate's launcher, which starts 2 processes itself" in said
    assert "mixed_precision=bf16" in said
    assert "ACCELERATE_MIXED_PRECISION=bf16 wanshim run --gpus N -- python train.py." in said


STEPS = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=1.0)
weight.sum().backward()
optimizer.step()
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_loop_without_a_framework_that_is_planned_for_is_told_at_its_first_step(tmp_path: Path, count: int) -> None:
    """As one over diffusers: several ranks are ended, since each would train by itself, and one goes on."""
    done = run(tmp_path, "--gpus", str(count), "--", "train.py", script=STEPS)
    assert (done.returncode == 0, "trained" in done.stdout) == (count == 1, count == 1)
    reason = f"--gpus {count} has no effect on this training loop: the program has not imported diffsynth"
    assert reason + ", and each of 2 processes trains by itself. " * (count > 1) in done.stderr


@pytest.mark.slow
def test_loop_over_what_wanshim_s_own_functions_shard_is_left_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "--gpus", "2", "--", "train.py", script=f"import wanshim\nwanshim.shard_sequence\n{STEPS}")
    assert (done.returncode, done.stdout) == (0, "trained\ntrained\n"), done.stderr


def test_line_on_what_a_configuration_alone_sets_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from accelerate.commands import launch
    from accelerate.commands.config import config_args

    from wanshim.launch.boot import launchers

    configured = tmp_path / "default_config.yaml"
    configured.write_text("distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\nnum_machines: 1\n")
    for module in (launch, config_args):
        monkeypatch.setattr(module, "default_config_file", str(configured))
    made = SimpleNamespace(__wrapped__=launch.prepare_simple_launcher_cmd_env)  # as it is behind the watch
    monkeypatch.setattr(launch, "prepare_simple_launcher_cmd_env", made)
    launchers._say_what_is_lost()
    assert "accelerate's configuration sets mixed_precision=bf16, which its launcher" in capfd.readouterr().err


@pytest.mark.slow
def test_engine_that_accelerates_launcher_sets_is_refused_as_an_engine(tmp_path: Path) -> None:
    done = run(tmp_path, "--gpus", "2", "--", tool("accelerate"), "launch", "--use_fsdp", "train.py")
    assert (done.returncode, started(tmp_path)) == (2, [])
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("wanshim: "))
    assert line.startswith("wanshim: FSDP (--use_fsdp, ACCELERATE_USE_FSDP, or distributed_type in ")
    assert ") and --gpus 2 each take over the parameters: leave one of the two out" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(NOTEBOOK, id="notebook_launcher"),
        pytest.param(SPAWNS, id="spawn", marks=pytest.mark.sweep),
        pytest.param(SPAWNS.replace('"tcp://127.0.0.1:{port}"', '"file://" + os.path.abspath("meeting")'), id="file"),
        pytest.param(DEBUGS, id="debug_launcher", marks=pytest.mark.sweep),
    ],
)
def test_program_that_starts_processes_itself_is_refused(tmp_path: Path, script: str) -> None:
    refused(tmp_path, "train.py", script=script.replace("{port}", str(ranks.free_port())))


TIMED = """
import torch.distributed as dist
import wanshim
dist.init_process_group("gloo")
print(wanshim.report(strict=False).row("torch.pg_timeout").state)
dist.destroy_process_group()
"""


def test_look_at_a_job_leaves_a_feature_over_the_same_function_in_place(tmp_path: Path) -> None:
    done = two(tmp_path, TIMED, WANSHIM_PG_TIMEOUT_S="100")
    assert "exercised" in done.stdout, done.stdout + done.stderr
    assert "displaced" not in done.stdout + done.stderr


def test_job_of_other_sizes_is_refused_before_it_waits_for_its_processes(tmp_path: Path) -> None:
    alone = SPAWNS.replace("tcp://127.0.0.1:{port}", f"file://{tmp_path}/meeting").replace("nprocs=3", "nprocs=1")
    assert "one joined a job as rank 0 of 3" in refused(tmp_path, "train.py", script=alone)


def binary(folder: Path, name: str, recipe: str) -> str:
    """A double of a launcher that is no Python and no shell: awk, which runs a recipe."""
    (folder / f"{name}.recipe").write_text(recipe.replace("python", sys.executable))
    (folder / name).write_text(f'#!/usr/bin/env -S awk -f\nBEGIN {{ exit system("sh {folder}/{name}.recipe") }}\n')
    (folder / name).chmod(0o755)
    return str(folder / name)


STARTS_TWO = {
    "numbers": "for r in 0 1; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 python train.py || exit; done",
    "more": "for r in 0 1 2; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=3 python train.py || exit; done",
}


@pytest.mark.parametrize("recipe", list(STARTS_TWO.values()), ids=list(STARTS_TWO))
def test_launcher_of_any_kind_is_refused_when_its_first_process_comes_up_as_another_rank(
    tmp_path: Path, recipe: str
) -> None:
    """Rank 0 of the launcher's job is no rank 1, which is started first."""
    said = refused(tmp_path, binary(tmp_path, "starter", recipe))
    assert "what starts processes itself: one came up as rank 0 of" in said


@pytest.mark.parametrize("command", ["mpirun -n 2 python", "srun python", "python -m deepspeed.launcher.runner"])
def test_launcher_of_other_programs_is_refused_before_it_starts(tmp_path: Path, command: str) -> None:
    name, *rest = command.split()
    started_it = tmp_path / "started"
    program = name if name == "python" else binary(tmp_path, name, f"touch {started_it}")
    assert "which starts processes itself" in refused(tmp_path, program, *rest)
    assert not started_it.exists()


def test_two_programs_of_one_rank_end_the_job(tmp_path: Path) -> None:
    """Of a launcher that sets no RANK, as mpirun."""
    script = "import time; time.sleep(30)"
    command = binary(tmp_path, "starter", "python train.py & python train.py & wait")
    done = run(tmp_path, "--gpus", "2", "--", command, script=script)
    assert done.returncode == 2
    assert done.stderr.count("two programs came up as one rank") == 1


@pytest.mark.slow
def test_program_may_start_a_process_with_a_rank_of_its_own(tmp_path: Path) -> None:
    """Of a job of one, or of none."""
    script = (
        "import os, subprocess, sys\n"
        "for own in ({'RANK': '0', 'WORLD_SIZE': '1'}, {'RANK': ''}):\n"
        "    subprocess.run([sys.executable, '-c', 'print(1)'], env={**os.environ, **own}, check=True)\n"
    )
    done = two(tmp_path, script)
    assert (done.returncode, done.stdout) == (0, "1\n" * 4)


LISTENS = """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
open(f"pid.{os.environ['RANK']}.part", "w").write(str(os.getpid()))
os.rename(f"pid.{os.environ['RANK']}.part", f"pid.{os.environ['RANK']}")
time.sleep(600)
"""


@pytest.mark.slow
def test_ranks_listen_on_the_loopback_address_alone(tmp_path: Path) -> None:
    variables = environment()
    del variables["GLOO_SOCKET_IFNAME"]
    with launched(tmp_path, LISTENS, variables) as (launcher, pids):
        found = listening([launcher.pid, *pids])
    assert found == {LOOPBACK}


def uv(folder: Path) -> str:
    """A double of `uv run`, which is no shell script and stays as the parent of what it runs."""
    command = 'for (i = 2; i < ARGC; i++) words = words " " ARGV[i]; exit system(words)'
    (folder / "uv").write_text(f"#!/usr/bin/env -S awk -f\nBEGIN {{ {command} }}\n")
    (folder / "uv").chmod(0o755)
    return str(folder / "uv")


@pytest.mark.sweep
@pytest.mark.slow  # imports torch in four processes
def test_rank_behind_uv_run_is_one_in_all_that_is_said(tmp_path: Path) -> None:
    script = "import os, torch\nif 'FAILS' in os.environ:\n    raise ValueError('boom')\n"
    command = ["--gpus", "2", "--", uv(tmp_path), "run", sys.executable, "train.py"]
    assert run(tmp_path, *command, script=script).stderr == f"wanshim: {TRAINED_NOTHING}\n"
    assert "train.py:3 in <module>: ValueError: boom" in run(tmp_path, *command, script=script, FAILS="1").stderr


@pytest.mark.slow
def test_first_python_that_a_rank_s_program_starts_may_fail(tmp_path: Path) -> None:
    """As a recipe of make may look for a package before it trains: an error there ends no rank."""
    recipe = "python -c 'import no_such_package' 2> /dev/null || true\npython train.py"
    done = run(tmp_path, "--gpus", "2", "--", binary(tmp_path, "make", recipe))
    assert (done.returncode, len(started(tmp_path))) == (0, 2), done.stderr


def test_rank_behind_uv_run_that_cannot_activate_ends_before_it_trains_by_itself(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True, timeout=60)
    python = str(tmp_path / "other" / "bin" / "python")
    done = run(tmp_path, "--gpus", "2", "--", uv(tmp_path), "run", python, "train.py")
    assert (done.returncode, started(tmp_path)) == (2, [])


def test_exit_status_is_that_of_the_script(tmp_path: Path) -> None:
    done = two(tmp_path, "import sys, os; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    assert (done.returncode, done.stderr) == (
        3,
        "wanshim: rank 1 ended with exit status 3; its own output is above\n",
    )


# The other rank would wait for ever, as in a collective.
RAISES = """
import os, time
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("no video\\nin this folder")
    time.sleep(600)
main()
"""


def test_failure_ends_the_job_with_rank_place_and_cause_in_the_last_line(tmp_path: Path) -> None:
    done = two(tmp_path, RAISES)
    assert done.returncode == 1
    *traceback, last = done.stderr.splitlines()
    place = f"{tmp_path / 'train.py'}:5 in main"
    assert last == f"wanshim: rank 1 failed at {place}: ValueError: no video in this folder"
    assert traceback[0] == "Traceback (most recent call last):"
    assert sum("Traceback" in line for line in traceback) == 1


LEAVES = """
import os, sys
import torch.distributed as dist
destroy, abort = dist.destroy_process_group, dist.distributed_c10d._abort_process_group
dist.distributed_c10d._abort_process_group = lambda: (print("left", flush=True), abort())
dist.init_process_group("gloo")
dist.barrier()  # else one may leave before the other is connected with it
if sys.argv[1] == "forks":
    if os.fork() == 0:
        sys.exit()
    os.wait()
elif sys.argv[1] == "destroys":
    destroy()
elif sys.argv[1] == "raises":
    raise ValueError
elif sys.argv[1] == "one exits":
    if dist.get_rank() == 1:
        sys.exit(1)
    dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "left"), [("ends", 2), ("forks", 2), ("destroys", 0), ("raises", 0), ("one exits", 1)]
)
def test_ranks_leave_the_groups_of_a_program_that_knows_of_none(tmp_path: Path, does: str, left: int) -> None:
    """torch prints a warning of NCCL's that are open as the interpreter ends."""
    done = two(tmp_path, LEAVES, does)
    assert (done.stdout.count("left"), done.returncode) == (left, int(does in ("raises", "one exits"))), done.stderr


LOADS = """
import os
from torch.utils.data import DataLoader, Dataset
class Videos(Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        raise OSError("no meta information\\n" + "codec " * 400 + "\\n moov atom not found: a.mp4")
if os.environ["RANK"] == "0":
    next(iter(DataLoader(Videos(), num_workers=1)))
"""


@pytest.mark.slow
def test_last_line_has_the_cause_that_a_worker_of_a_loader_has_met(tmp_path: Path) -> None:
    last = two(tmp_path, LOADS).stderr.splitlines()[-1]
    assert "train.py:10 in <module>: OSError: no meta information codec" in last
    assert last.endswith("codec moov atom not found: a.mp4")


def test_refusal_is_said_once_for_all_ranks_and_without_a_traceback(tmp_path: Path) -> None:
    script = "from wanshim.errors import FeatureUnavailable\nraise FeatureUnavailable('3 ranks for 2 heads')"
    done = two(tmp_path, script)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"wanshim: rank \d failed at .*/train.py:2 in <module>: FeatureUnavailable: 3 ranks .*", line)


LOSES_ITS_PEER = """
import os, signal, time
from pathlib import Path
if os.environ["RANK"] == "1":
    Path("pid.part").write_text(str(os.getpid()))
    Path("pid.part").rename("pid")
    os.kill(os.getpid(), signal.SIGKILL)
while not Path("pid").exists():
    time.sleep(0.01)
peer = Path("/proc", Path("pid").read_text(), "stat")
while peer.exists() and ") Z " not in peer.read_text():
    time.sleep(0.01)
raise RuntimeError("connection closed by peer")
"""


def test_rank_that_is_killed_is_named_though_another_fails_for_it(tmp_path: Path) -> None:
    """As a rank that loses its peer in a collective."""
    done = two(tmp_path, LOSES_ITS_PEER)
    assert done.returncode == 128 + signal.SIGKILL
    last = done.stderr.splitlines()[-1]
    assert last == "wanshim: rank 1 was ended by SIGKILL: out of host memory, or killed by hand"


def test_file_on_standard_input_reaches_each_rank_from_where_it_stands(tmp_path: Path) -> None:
    script = "import os, sys\nopen('read.' + os.environ['RANK'], 'w').write(sys.stdin.read())\n"
    (tmp_path / "answers").write_text("first\nyes\nno\n")
    with (tmp_path / "answers").open("rb", buffering=0) as file:
        os.lseek(file.fileno(), len("first\n"), os.SEEK_SET)
        done = run(tmp_path, "--gpus", "2", "--", "train.py", script=script, stdin=file.fileno())
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == len("first\n")  # the rest is for whoever comes next
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"read.{rank}").read_text() for rank in (0, 1)] == ["yes\nno\n"] * 2


@pytest.mark.slow
def test_pipe_is_rank_0s_and_nothing_of_it_is_taken_that_the_program_does_not_read(tmp_path: Path) -> None:
    """A shell that reads its script from a pipe has the next command in it."""
    script = "import os\nopen('read.' + os.environ['RANK'], 'wb').write(os.read(0, 4))\n"
    reader, writer = os.pipe()
    os.write(writer, b"yes\nthe rest")
    os.close(writer)
    done = run(tmp_path, "--gpus", "2", "--", "train.py", script=script, stdin=reader)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"read.{rank}").read_text() for rank in (0, 1)] == ["yes\n", ""]
    assert os.read(reader, 99) == b"the rest"
    os.close(reader)


# -- signals -------------------------------------------------------------------------------------------

WAITS = """
import os, sys, time
from pathlib import Path
Path(f"pid.{os.environ['RANK']}.part").write_text(str(os.getpid()))
Path(f"pid.{os.environ['RANK']}.part").rename(f"pid.{os.environ['RANK']}")
time.sleep(600)
"""


@contextmanager
def launched(
    folder: Path, script: str = WAITS, variables: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A started launcher, and the processes of its two ranks."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "wanshim", "run", "--gpus", "2", "--", "train.py"]
    variables = environment() if variables is None else variables
    with subprocess.Popen(command, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            files = [folder / "pid.0", folder / "pid.1"]
            until(lambda: all(file.exists() for file in files))
            yield launcher, [int(file.read_text()) for file in files]
        finally:
            launcher.kill()


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path) as (launcher, ranks):
        launcher.kill()
        until(lambda: not any(map(is_running, ranks)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signal_that_ends_the_launcher_ends_the_ranks_first(tmp_path: Path, number: signal.Signals) -> None:
    with launched(tmp_path) as (launcher, ranks):
        launcher.send_signal(number)
        assert launcher.wait(60) == 128 + number
        assert not any(map(is_running, ranks))
        assert launcher.stderr is not None
        assert launcher.stderr.read().splitlines()[-1] == f"wanshim: ended by {number.name}, with all ranks"


SAVES = WAITS.replace(
    "import os, sys, time",
    """
import os, signal, subprocess, sys, time
def save(number, frame):
    assert child.poll() is None
    child.kill()
    sys.exit(4)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGUSR1, save)
""",
)


def test_signal_at_which_a_program_saves_reaches_each_rank_and_none_of_its_children(tmp_path: Path) -> None:
    with launched(tmp_path, SAVES) as (launcher, _):
        launcher.send_signal(signal.SIGUSR1)
        assert launcher.wait(60) == 4


@pytest.mark.slow
def test_rank_that_is_stopped_is_named_at_once_and_may_go_on(tmp_path: Path) -> None:
    with launched(tmp_path) as (launcher, ranks):
        assert launcher.stderr is not None
        os.kill(ranks[1], signal.SIGSTOP)
        assert launcher.stderr.readline() == (
            f"wanshim: rank 1 was stopped by SIGSTOP, and the others wait for it: kill -CONT {ranks[1]} resumes it\n"
        )
        os.kill(ranks[1], signal.SIGCONT)
        assert launcher.stderr.readline() == "wanshim: rank 1 goes on\n"
        os.kill(ranks[1], signal.SIGSTOP)
        launcher.stderr.readline()
        launcher.terminate()
        assert launcher.wait(60) == 128 + signal.SIGTERM
        assert not any(map(is_running, ranks))


def test_rank_that_hangs_while_it_ends_does_not_hold_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in gloo's destructor, which waits five minutes for a peer that is gone."""
    script = "import atexit, time\natexit.register(time.sleep, 600)\nraise ValueError('boom')\n"
    (tmp_path / "train.py").write_text(script)
    from wanshim.launch import ranks, start

    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "GRACE_S", 1.0)
    said: list[str] = []
    monkeypatch.setattr(ranks, "say", said.append)
    command = [sys.executable, str(tmp_path / "train.py")]
    assert ranks.run(command, 2, start.environment(gpus=2)) == 1
    assert len(said) == 1
    assert said[0].endswith("train.py:3 in <module>: ValueError: boom")


def test_rank_that_fails_while_the_others_are_looked_at_is_no_success() -> None:
    """A double, since no real process ends between two lines on purpose."""
    from wanshim.launch import ranks

    class Late:
        looked_at, status, failed_at, said = False, 3, (True, 0.0), {"refusal": ""}

        @property
        def has_ended(self) -> bool:
            return self.looked_at

        @property
        def has_failed(self) -> bool:
            before, self.looked_at = self.looked_at, True
            return before

        def say_if_stopped(self) -> None: ...
        def send(self, *signals: int) -> None: ...
        def describe_failure(self) -> str:
            return "it failed"

    with ranks._Signals() as signals:
        assert ranks._wait([Late()], signals) == 3  # type: ignore[list-item]
