"""deploy/: the commands for Slurm and Kubernetes, run by two launchers of one machine under two host names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import dist
from wanshim import settings
from wanshim.launch.ranks import free_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NODES = ("wan-lora-0.wan-lora", "wan-lora-1.wan-lora")
# What a training job does before its first step: join, and compare what the ranks carry.
TRAIN = """
import json, os, socket
from pathlib import Path
import torch.distributed as dist
import wanshim
from wanshim.core.ranks import agreement

dist.init_process_group("gloo")
agreement.ensure(call="the test's first common work")
said = {name: os.environ.get(name) for name in ("WANSHIM_PLAN", "LOCAL_WORLD_SIZE", "WORLD_SIZE")}
said |= {"host": socket.gethostname(), "active": wanshim.report().active}
Path(f"rank{dist.get_rank()}.json").write_text(json.dumps(said))
dist.barrier()
"""
# In namespaces of its own: another host name, and a hosts file that knows both.
ON_NODE = ["unshare", "--uts", "--mount", "sh", "-c", 'mount --bind "$HOSTS" /etc/hosts && hostname "$0" && exec "$@"']


def _may_unshare() -> bool:
    try:
        tried = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return tried.returncode == 0


needs_namespaces = pytest.mark.skipif(not _may_unshare(), reason="this user may not give a process another host name")


def environment(folder: Path, **variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(NODES)}\n")
    programs = [str(folder / "bin"), str(Path(sys.executable).parent), clean["PATH"]]
    clean |= {"PATH": os.pathsep.join(programs), "HOSTS": str(folder / "hosts"), "OMP_NUM_THREADS": "1"}
    return clean | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"} | variables


def finish(started: list[subprocess.Popen[str]]) -> None:
    for each in started:
        said, _ = each.communicate(timeout=280)
        assert each.returncode == 0, said[-4000:]


def start(folder: Path, command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def program(folder: Path, name: str, text: str) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def by_slurm(folder: Path, processes: int) -> None:
    """scontrol and srun stand in for Slurm's; srun starts its command on each node."""
    on_node = " ".join(f"'{word}'" if " " in word else word for word in ON_NODE)
    program(folder, "scontrol", f"#!/bin/sh\nprintf '%s\\n' {' '.join(NODES)}\n")
    starts = "\n".join(f'{on_node} {node} "$@" & p{i}=$!' for i, node in enumerate(NODES))
    program(folder, "srun", f"#!/bin/sh\n{starts}\nwait $p0 && wait $p1\n")
    slurm = {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": str(processes)}
    variables = environment(folder, SLURM_JOB_ID=folder.name, PORT=str(free_port()), **slurm)
    finish([start(folder, ["bash", str(DEPLOY / "slurm.sh"), "train.py"], variables)])


def test_slurm_warning_reaches_the_training_and_the_job_is_queued_again(tmp_path: Path) -> None:
    """scontrol and srun stand in for Slurm's: srun notes SIGTERM as a training saves its state."""
    program(tmp_path, "scontrol", '#!/bin/sh\n[ "$1" = requeue ] && echo "$2" > requeued\necho node\n')
    saves = "trap 'echo > saved; exit 75' TERM\necho > started\nwhile :; do sleep 0.1; done"
    program(tmp_path, "srun", f"#!/bin/sh\n{saves}\n")
    slurm = {"SLURM_JOB_NODELIST": "n", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7"}
    job = start(tmp_path, ["bash", str(DEPLOY / "slurm.sh"), "train.py"], environment(tmp_path, **slurm))
    limit = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    finish([job])
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "requeued").read_text() == "7\n"


def container() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))
    (job,) = (each for each in documents if each["kind"] == "Job")
    service = next(each for each in documents if each["kind"] == "Service")
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == len(NODES)
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    return dict(pod["containers"][0])


def by_kubernetes(folder: Path, processes: int) -> None:
    """The container's command and variables, once for each pod."""
    spec = container()
    variables = {one["name"]: one["value"].replace("/shared", str(folder)) for one in spec["env"]}
    port = str(free_port())
    started = []
    for node in NODES:
        words = (*spec["command"], *spec["args"])
        command = [word.replace("29500", port).replace("node=4", f"node={processes}") for word in words]
        started.append(start(folder, [*ON_NODE, node, *command], environment(folder, **variables)))
    finish(started)


@pytest.mark.sweep
@pytest.mark.slow  # two launchers and their ranks, each of which imports torch
@needs_namespaces
@pytest.mark.parametrize(
    ("launch", "processes"), [pytest.param(by_slurm, 1, marks=pytest.mark.sweep), (by_kubernetes, 2)]
)
def test_ranks_of_two_nodes_join_and_carry_the_same_patches(
    tmp_path: Path, launch: Callable[[Path, int], None], processes: int
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    launch(tmp_path, processes)
    said = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank?.json"))]
    nodes = [node for node in NODES for _ in range(processes)]
    assert [one["host"] for one in said] in (nodes, nodes[::-1])  # torchrun sorts by address, here one, and pid
    for one in said:
        sizes = str(processes), str(len(NODES) * processes)
        assert (one["WANSHIM_PLAN"], one["LOCAL_WORLD_SIZE"], one["WORLD_SIZE"]) == ("sequence", *sizes)
        assert one["active"]


def test_variables_of_the_recipes_are_taken() -> None:
    recipes = {one["name"]: one["value"] for one in container()["env"] if one["name"].startswith("WANSHIM_")}
    assert set(settings.read(recipes).sources.values()) == set(recipes)


def test_container_installs_what_make_dist_makes_and_runs_as_a_user_of_its_own() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (copied,) = re.findall(r"^COPY (\S+) ", text, re.MULTILINE)
    assert (ROOT / copied).parent == dist.DIST
    assert Path(f"dist/wanshim-{dist.version()}-py3-none-any.whl").match(copied)
    user = int(re.search(r"--uid (\d+)", text)[1])  # type: ignore[index]
    pods = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    assert f"runAsUser: {user}" in pods
    assert text.index("USER trainer") < text.index("wanshim doctor") < text.index("ENTRYPOINT")
