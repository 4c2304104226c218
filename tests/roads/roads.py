"""The list of roads: what a user types, beside what, and what has to come of it; and how one is run.

A road is run in a folder of its own by a shell, with the scripts of this package as the user's, which name no device.
Its result is compared with that of the same script without wanshim.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.sockets import LOOPBACK, descendants, listening
from wanshim.launch.ranks import free_port

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRAIN = "--dataset_base_path . --checkpoint checkpoint --height 32 --width 48 --num_frames 5 --dataset_num_workers 0"
TRAIN += " --learning_rate 1e-3 --output_path out"
CHECKPOINTING = " --use_gradient_checkpointing"
LARGER = TRAIN.replace("--height 32 --width 48 --num_frames 5", "--height 480 --width 832 --num_frames 13")
ALONE = "python train.py ..."
DRAWN = ("noise", "latents")  # by each process from where its generator stands
LOOKS_S = 0.3  # between two looks at the sockets
ACCELERATE = "accelerate launch train.py ..."  # one process on each GPU that there is
# On the CPU the processes that a plan of GPUs starts are few, and what names a GPU names the CPU.
ON_CPU = {"cuda:0,cuda:1": "cpu,cpu", "--gpus 4": "--gpus 2"}


@dataclass(frozen=True)
class Road:
    """A command of the documents.

    Args:
        command: as it stands there; "..." are the script's own arguments.
        reference: the same without wanshim, whose result is to come; None: nothing is compared.
        apart: how far the results may differ, of their norm; 0: not in one bit.
        arguments: in place of "...".
        says: what is printed, as regular expressions.
        silent: what is not printed.
        gpus: how many it needs.
        on_cpu: if False, it needs a GPU's kernels, or is another one there.
        sweep: left to `make matrix`, for each part of it is in another road, or test, of `make slow`.
        status: that it ends with; a refusal leaves no result to compare.
    """

    command: str
    reference: str | None = ALONE
    apart: float = 0.0
    arguments: str = TRAIN + CHECKPOINTING
    says: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    gpus: int = 1
    on_cpu: bool = True
    sweep: bool = False
    status: int = 0

    @property
    def name(self) -> str:
        return re.sub(r"[^\w=.:-]+", "_", f"{self.command} {self.extra}").strip("_")

    @property
    def extra(self) -> str:
        return self.arguments.removeprefix(TRAIN).strip()


SPLIT = "diffsynth.model_split exercised"
FP32 = TRAIN + CHECKPOINTING + " --dtype float32"  # in which another order of addition shows little
ROUNDING = 2e-3

TRAINING = (
    Road("wanshim run --gpus 2 -- python train.py ...", apart=ROUNDING, arguments=FP32, gpus=2,
         says=(SPLIT, "sequence parallel over 2 ranks")),
    Road("wanshim run --gpus 4 -- python train.py ...", apart=ROUNDING, arguments=FP32, gpus=4, says=(SPLIT,),
         on_cpu=False),  # on the CPU it is that of two
    Road("WANSHIM_VAE_ENCODE=auto wanshim run --gpus 4 -- python train.py ...", apart=ROUNDING, arguments=FP32, gpus=4,
         says=(SPLIT, "diffsynth.vae_encode exercised"), sweep=True),
    Road("WANSHIM_ENCODE_CACHE=auto wanshim run --gpus 2 -- python train.py ...", apart=ROUNDING, arguments=FP32,
         gpus=2, says=(SPLIT, "diffsynth.encode_cache exercised"), sweep=True),
    Road("WANSHIM_ENCODE_CACHE=auto wanshim run -- accelerate launch train.py ...", reference=ACCELERATE,
         says=("diffsynth.encode_cache exercised",), sweep=True),
    Road("WANSHIM_PLAN=sequence wanshim run -- accelerate launch --num_processes 4 train.py ...", apart=ROUNDING,
         arguments=FP32, gpus=4, says=(SPLIT,), sweep=True),
    Road("WANSHIM_PLAN=sequence:2 wanshim run -- accelerate launch --num_processes 4 train.py ...", apart=ROUNDING,
         reference="accelerate launch --num_processes 2 train.py ...", arguments=FP32, gpus=4, says=(SPLIT,),
         sweep=True),
    Road("WANSHIM_DEVICES=cuda:0,cuda:1 wanshim run -- accelerate launch train.py ...", gpus=2, says=(SPLIT,),
         sweep=True),
    Road("WANSHIM_DEVICES=cuda:0,cuda:1 wanshim run -- torchrun --nproc-per-node 1 train.py ...", gpus=2,
         says=(SPLIT,), sweep=True),
    Road("WANSHIM_DEVICES=cuda:0,cuda:1 wanshim run -- torchrun --nproc-per-node 1 train.py ... "
         "--gradient_accumulation_steps 4", reference="python train.py ... --gradient_accumulation_steps 4",
         apart=ROUNDING, arguments=FP32, gpus=2, says=(SPLIT, "micro-batches in a pipeline"), sweep=True),
    Road("WANSHIM_DEVICES=cuda:0,cuda:1 wanshim run -- accelerate launch train.py ... --gradient_accumulation_steps 4",
         reference="python train.py ... --gradient_accumulation_steps 4", apart=ROUNDING, arguments=FP32, gpus=2,
         says=(SPLIT,), sweep=True),
    Road("WANSHIM_PLAN=stream wanshim run -- accelerate launch --num_processes 2 train.py ...", gpus=2,
         reference="accelerate launch --num_processes 2 train.py ...", says=(SPLIT,), sweep=True),
    Road("WANSHIM_PLAN=stream wanshim run -- python train.py ...", arguments=FP32, says=(SPLIT,), sweep=True),
    Road("wanshim run --gpus 1 -- python train.py ...", says=(SPLIT,), on_cpu=False),
    Road("wanshim run --gpus 1 -- python train.py ... --use_gradient_checkpointing", arguments=TRAIN, says=(SPLIT,),
         on_cpu=False),
    Road("wanshim run --fast -- python train.py ...", apart=0.9,
         says=("WANSHIM_FAST turned on", "diffsynth.compiled_blocks exercised"), on_cpu=False),
    Road("WANSHIM_PROGRESS_DIR=training_logs wanshim run -- accelerate launch train.py ...", reference=ACCELERATE,
         says=("diffsynth.progress exercised",), sweep=True),
    Road("WANSHIM_RESUME=auto wanshim run -- accelerate launch train.py ...", reference=ACCELERATE,
         says=("diffsynth.resume exercised",), sweep=True),
    Road("WANSHIM_OFFLOAD=on wanshim run -- accelerate launch train.py ... --use_gradient_checkpointing",
         reference=ACCELERATE, arguments=LARGER, says=("diffsynth.checkpoint_offload exercised",), on_cpu=False),
    Road("WANSHIM_KEEP=attention wanshim run -- accelerate launch train.py ... --use_gradient_checkpointing",
         reference=ACCELERATE, arguments=TRAIN, says=("diffsynth.kept_attention exercised",), on_cpu=False),
    Road("WANSHIM_KEEP=blocks wanshim run -- accelerate launch train.py ... --use_gradient_checkpointing",
         reference=ACCELERATE, arguments=TRAIN, says=("diffsynth.kept_attention exercised",), on_cpu=False),
    Road("WANSHIM_COMPILE=1 wanshim run -- accelerate launch train.py ... --use_gradient_checkpointing",
         reference=ACCELERATE, arguments=TRAIN, apart=0.9, says=("diffsynth.compiled_blocks exercised",), on_cpu=False),
    Road("WANSHIM_COMPUTE=float8 wanshim run -- accelerate launch train.py ... --use_gradient_checkpointing",
         reference=ACCELERATE, arguments=TRAIN, apart=0.9, says=("diffsynth.eight_bit_compute exercised",),
         on_cpu=False),
)  # fmt: skip
# Variables that the documents name without a command of their own, with every launcher of one process.
ONE_GPU = tuple(
    Road(
        f"WANSHIM_{variable} wanshim run -- {launcher} train.py ...",
        says=(says,),
        apart=apart,
        on_cpu=False,
        reference=ACCELERATE if launcher.startswith("accelerate") else ALONE,
    )
    for variable, says, apart in (
        ("KEEP=attention", "diffsynth.kept_attention exercised", 0.0),
        ("KEEP=blocks", "diffsynth.kept_attention exercised", 0.0),
        ("PLAN=stream WANSHIM_KEEP=blocks", SPLIT, 0.0),
        ("PLAN=auto", SPLIT, 0.0),
    )
    for launcher in ("python", "accelerate launch", "torchrun --nproc-per-node 1")
)
SEVERAL_GPUS = tuple(
    Road(f"{variable}wanshim run --gpus {gpus}{option} -- python train.py ...", apart=apart, arguments=FP32, gpus=gpus,
         says=(SPLIT, f"sequence parallel over {gpus} ranks", says), on_cpu=False)
    for gpus in (2, 4)
    for variable, option, says, apart in (
        ("WANSHIM_KEEP=blocks ", "", "blocks ran .* times without being computed again", ROUNDING),
        ("", " --fast", "WANSHIM_FAST turned on", 0.9),
    )
)  # fmt: skip
GENERATION = tuple(
    Road(f"wanshim generate --gpus {gpus} -- python pipeline.py ...", reference="python pipeline.py ...", apart=apart,
         arguments=arguments, says=(says, "diffusers.generate exercised"), gpus=gpus, on_cpu=gpus == 2,
         sweep=arguments != "float32 1")
    for gpus, arguments, apart, says in (
        (2, "float32 1", 0.0, "guidance over 2, bit for bit"),
        (2, "bfloat16 2", 0.0, "guidance over 2, bit for bit"),
        (4, "float32 2", ROUNDING, "guidance over 2 x tokens over 2"),
    )
)  # fmt: skip
REFUSED = tuple(
    Road(f"WANSHIM_PLAN=stream WANSHIM_BASE=float8 wanshim run -- {launcher} train.py ...", reference=None, status=1,
         says=("WANSHIM_PLAN=stream cannot train this model: WANSHIM_BASE",), on_cpu=False)
    for launcher in ("python", "accelerate launch")
)  # fmt: skip
DECODING = tuple(
    Road(f"{variable} wanshim run -- {launcher} {script}", reference=f"python {script} ...", arguments=arguments,
         says=(f"{feature} exercised",), gpus=gpus, on_cpu=gpus > 1, sweep=True)
    for variable, feature, script in (
        ("WANSHIM_VAE_MODE=auto", "diffusers.vae_decode", "generate.py"),
        ("WANSHIM_VAE_ENCODE=auto", "diffusers.vae_encode", "your_script.py"),
    )
    for launcher, gpus in (("torchrun --nproc-per-node 2", 2), ("python", 1))
    for arguments in ("2.1 float32 1", "2.2 bfloat16 2", "2.1 float16 3")
)  # fmt: skip
# What users' scripts and machines have that no variable and no argument says.
TWO_RANKS = "sh ranks.sh python train.py ..."
AS_THEY_ARE = (
    Road("WANSHIM_PLAN=stream wanshim run -- python train.py ... --always_checkpoints", arguments=TRAIN,
         reference="python train.py ... --always_checkpoints", says=(SPLIT,), sweep=True),
    Road(f"WANSHIM_PLAN=sequence wanshim run -- {TWO_RANKS}", apart=ROUNDING, arguments=FP32, gpus=2,
         says=(SPLIT, "sequence parallel over 2 ranks"), sweep=True),
    Road("wanshim run --gpus 2 -- python train.py ... --reduces --validates --stamped", apart=ROUNDING,
         reference="python train.py ... --reduces --validates --stamped", arguments=FP32, gpus=2,
         says=(SPLIT, "validated "), sweep=True),
    Road("WANSHIM_STRICT=1 wanshim run --gpus 2 -- python start.py train.py ...", apart=ROUNDING, arguments=FP32,
         gpus=2, says=(SPLIT, "sequence parallel over 2 ranks"), silent=("no effect",), sweep=True),
    Road("WANSHIM_RESUME=auto wanshim run --gpus 2 -- nohup python train.py ...", apart=ROUNDING,
         arguments=FP32, gpus=2, says=(SPLIT, "diffsynth.resume exercised"), sweep=True),
    Road("WANSHIM_STRICT=1 wanshim run --gpus 2 -- python train.py ... --task sft:data_process", gpus=2,
         reference="python train.py ... --task sft:data_process", sweep=True),
    Road("CC=no-such-compiler CXX=no-such-compiler WANSHIM_COMPILE=1 wanshim run -- python train.py ...",
         apart=ROUNDING, arguments=FP32, sweep=True),
    Road("wanshim generate --gpus 2 -- python pipeline.py ...", reference="python pipeline.py ...", gpus=2,
         arguments="float32 1 anew", says=("guidance over 2, bit for bit", "diffusers.generate exercised"),
         sweep=True),
)  # fmt: skip
ROADS = (*TRAINING, *ONE_GPU, *SEVERAL_GPUS, *REFUSED, *DECODING, *GENERATION, *AS_THEY_ARE)


def on_cpu(roads: Iterable[Road]) -> list[Any]:
    """Parameters of a slow test for those that run without a GPU."""
    return [
        pytest.param(road, marks=[pytest.mark.slow] + [pytest.mark.sweep] * road.sweep, id=road.name)
        for road in roads
        if road.on_cpu
    ]


# What cannot be a road here, with the test that runs it, or the reason.
ELSEWHERE = {
    "-m fastvideo.train.entrypoint.train": "tests/contract/fastvideo/test_readme.py",
    "torchrun --nproc-per-node 2 your_training_command": "tests/contract/fastvideo/test_readme.py",
    "vllm serve": "tests/contract/vllm_omni/test_readme.py",
    "wanshim demo": "tests/contract/test_cli.py",
    "srun wanshim run": "tests/contract/test_deploy.py",
    "torchrun --nnodes 2": "tests/contract/test_deploy.py",
    "examples/wanvideo/model_training/train.py": "tests/contract/diffsynth/test_training_guide.py",
    "wanshim run -f diffsynth.progress -- ...": "tests/contract/diffsynth/test_training_guide.py",
    "wanshim generate": "tests/contract/diffusers/test_generate.py",
    "-- python generate.py": "tests/contract/diffusers/test_generate.py",
    "wanshim warm": "tests/unit/test_warm.py",
    "wanshim doctor": "tests/contract/test_cli.py",
    "wanshim monitor": "tests/unit/monitor/test_server.py",
}
# Other words for a road that is in the list.
SAME_AS = {
    "wanshim run --gpus N -- python train.py ...": "wanshim run --gpus 2 -- python train.py ...",
    "wanshim run --gpus N": "wanshim run --gpus 2 -- python train.py ...",
    "wanshim run --gpus 2": "wanshim run --gpus 2 -- python train.py ...",
    "wanshim run --gpus 1": "wanshim run --gpus 1 -- python train.py ...",
    "wanshim run --fast": "wanshim run --fast -- python train.py ...",
    "wanshim run --fast -- ...": "wanshim run --fast -- python train.py ...",
    "wanshim run --gpus 4 -- python train.py --height 720 --width 1280 --num_frames 81 --use_gradient_checkpointing "
    "...": "wanshim run --gpus 4 -- python train.py ...",
}


@dataclass(frozen=True)
class Arrival:
    """What a command left in its folder, what it printed, and the addresses on which its processes listened."""

    folder: Path
    said: str
    listened: frozenset[str]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that was trained, decoded or encoded, on the CPU."""
        import torch
        from safetensors.torch import load_file

        found = {}
        for path in sorted(self.folder.glob("out/**/epoch-*.safetensors")):
            found |= {f"{path.name} {name}": tensor for name, tensor in load_file(path).items()}
        for number, path in enumerate(sorted(self.folder.glob("out/*/*.pth"), key=_sample)):
            kept = torch.load(path, map_location="cpu", weights_only=True)
            found |= {f"sample {number} {name}": tensor for name, tensor in kept.items() if name not in DRAWN}
        for path in sorted(self.folder.glob("*.0.pt")):
            found[path.name] = torch.load(path, map_location="cpu", weights_only=True)
        return found

    def losses(self) -> list[list[float]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("out/**/losses.*.json"))]


def _sample(path: Path) -> int:
    """The number of a sample in what `data_process` keeps: each rank takes every so manieth of them."""
    ranks = sum(folder.is_dir() for folder in path.parents[1].iterdir())
    return int(path.stem) * ranks + int(path.parent.name)


def travel(command: str, arguments: str, folder: Path, checkpoint: Path, *, on_cpu: bool, status: int = 0) -> Arrival:
    """Run a command as it stands in the documents, with the user's scripts, in an empty folder.

    Raises:
        AssertionError: it did not end with this status.
    """
    folder.mkdir(parents=True)
    (folder / "checkpoint").symlink_to(checkpoint)
    sources = {"generate.py": "decode.py", "your_script.py": "decode.py"}
    for script in ("train.py", "pipeline.py", "start.py", "ranks.sh", *sources):
        (folder / script).write_text((HERE / sources.get(script, script)).read_text())
    line = command.replace("...", arguments) if "..." in command else f"{command} {arguments}"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    if on_cpu:
        for word, other in ON_CPU.items():
            line = line.replace(word, other)
        # accelerate's own launcher starts one process where there is no GPU.
        line = re.sub(r"accelerate launch --num_processes (\d+)", r"torchrun --nproc-per-node \1", line)
        line = line.replace("accelerate launch", "accelerate launch --cpu")
        variables |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        variables["HOME"] = str(folder / "home")  # what is kept in the tester's is of no road, nor of any release
    else:  # several roads at once, and no variable says accelerate's port
        line = line.replace("accelerate launch", "accelerate launch --main_process_port 0")
    programs = _programs(folder / "bin")
    variables["PATH"] = os.pathsep.join([str(programs), str(Path(sys.executable).parent), variables["PATH"]])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH", "")]))
    variables["PET_MASTER_PORT"] = str(free_port())  # torchrun takes 29500 for each, too
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(["bash", "-c", line], cwd=folder, env=variables, **streams) as shell:
        ended, listened = threading.Event(), set()

        def look() -> None:
            while not ended.wait(LOOKS_S):
                listened.update(listening(descendants(shell.pid)))

        looking = threading.Thread(target=look)
        looking.start()
        try:
            said, _ = shell.communicate(timeout=540)
        finally:
            shell.kill()
            ended.set()
            looking.join()
    assert shell.returncode == status, f"{line}\nended with {shell.returncode}\n{said[-6000:]}"
    return Arrival(folder, said, frozenset(listened))


def _programs(folder: Path) -> Path:
    """`python` and `wanshim` of this interpreter, wherever it and the package lie."""
    folder.mkdir()
    for name, call in (("python", '"$@"'), ("wanshim", '-m wanshim "$@"')):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call}\n')
        (folder / name).chmod(0o755)
    return folder


def check(road: Road, found: Arrival, expected: Arrival | None) -> None:
    """What the end block says, and that the result is that of the same script without wanshim."""
    if "--gpus" in road.command:
        assert found.listened <= {LOOPBACK}
    for words in road.says:
        assert re.search(words, found.said), f"{words!r} is not in\n{found.said[-6000:]}"
    for words in road.silent:
        assert words not in found.said
    if expected is None:
        return
    ours, theirs = found.tensors(), expected.tensors()
    assert theirs
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in theirs.items() if not _agree(ours[name], tensor, road.apart)]
    assert not different, f"{len(different)} of {len(theirs)} differ, the first is {different[0]}"
    if road.apart == 0.0:
        assert found.losses() == expected.losses()
    elif road.apart == ROUNDING and "--reduces" in road.command:
        assert found.losses()[0] == pytest.approx(expected.losses()[0], rel=ROUNDING)


def _agree(ours: torch.Tensor, theirs: torch.Tensor, apart: float) -> bool:
    import torch

    if apart == 0.0:
        return torch.equal(ours, theirs)
    return bool(torch.linalg.vector_norm((ours - theirs).double()) <= apart * torch.linalg.vector_norm(theirs.double()))
