"""A copy of DiffSynth with one family's code changed: a user's script of that family is refused, by name, before its
models are loaded, and one of another family trains as with the code that is known."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wanshim.demo import clip, wan_checkpoint
from wanshim.patching import SourceTree
from wanshim.patching.probe import find

pytest.importorskip("torchaudio", reason="DiffSynth's MiniMax-H3 imports it")
pytest.importorskip("diffsynth.models.minimax_h3_dit", reason="this release has no MiniMax-H3")

from tests.contract.diffsynth import minimax_h3

# each takes some 20 seconds of imports; of either family the code is judged in tests/contract/unlisted.py, too
pytestmark = [pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(600)]

CODE = {
    "MiniMax-H3": "diffsynth.models.minimax_h3_dit:MiniMaxH3DiTBlock.forward",
    "Wan": "diffsynth.models.wan_video_dit:DiTBlock.forward",
}
H3_SIZE = "--height 32 --width 64 --num_frames 22 --dataset_num_workers 0 --samples 2 --use_gradient_checkpointing"


def changed(family: str, folder: Path) -> Path:
    """A folder with a DiffSynth whose block of this family is another one."""
    root = SourceTree.of_installed("diffsynth").root
    shutil.copytree(str(root), folder / "diffsynth", ignore=shutil.ignore_patterns("__pycache__"))
    module, name = CODE[family].split(":")
    file = folder / f"{module.replace('.', '/')}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    block = find(tree, name)
    assert isinstance(block, ast.FunctionDef)
    block.body.insert(0, ast.parse("changed = 1").body[0])
    file.write_text(ast.unparse(tree), encoding="utf-8")
    return folder


def job(family: str, folder: Path, output: str) -> list[str]:
    """A training script as users of DiffSynth have it, and its arguments."""
    if family == "Wan":
        files = wan_checkpoint.write(folder / "checkpoint")
        script, more = "wanshim.demo.train_lora", f"--video {clip.find()} --frames 5 --steps 1 --accumulation 1"
        return ["-m", script, "--checkpoint", str(files.folder), "--output", str(folder / output), *more.split()]
    minimax_h3.write(folder / "checkpoint")
    script = "tests.contract.diffsynth.minimax_h3_train"
    return [
        *("-m", script, "--checkpoint", str(folder / "checkpoint"), "--dataset_base_path", ""),
        *("--output_path", str(folder / output), *H3_SIZE.split()),
    ]


def run(command: list[str], framework: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`wanshim run` of a script with these options and variables; of the framework alone without any."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    clean |= {"PYTHONPATH": os.pathsep.join([str(framework), str(Path(__file__).parents[3])])}
    clean |= {"GLOO_SOCKET_IFNAME": "lo", **{f"WANSHIM_{name}": text for name, text in variables.items()}}
    start = [sys.executable, "-m", "wanshim", "run", *options, "--"] if variables else []
    return subprocess.run(
        [*start, sys.executable, *command],
        cwd=framework, env=clean, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def written(folder: Path) -> bytes:
    (file,) = folder.glob("*.safetensors")
    return file.read_bytes()


@pytest.mark.parametrize("family", ["MiniMax-H3", "Wan"])
def test_changed_family_is_refused_by_name_and_the_other_trains(family: str, tmp_path: Path) -> None:
    other = next(name for name in CODE if name != family)
    framework = changed(family, tmp_path / "framework")
    split = job(other, tmp_path, "split")
    done = run(split, framework, DEVICES="cpu,cpu", STRICT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "split into 2 stages" in done.stdout + done.stderr
    assert f"{family} is left out: {CODE[family]} differs from the code of" in done.stdout + done.stderr
    assert run(job(other, tmp_path, "plain"), framework).returncode == 0
    assert written(tmp_path / "split") == written(tmp_path / "plain")

    gpus = {"MiniMax-H3": 1, "Wan": 2}[family]
    plan = {"MiniMax-H3": "stream", "Wan": "sequence"}[family]
    found = run(job(family, tmp_path / "left out", "out"), framework, "--gpus", str(gpus), PLAN=plan)
    assert found.returncode != 0
    text = found.stderr.partition("FeatureUnavailable")[2]
    assert not list((tmp_path / "left out" / "out").glob("*.safetensors"))
    assert f"diffsynth.model_split is unavailable for this model: {family} is left out: {CODE[family]}" in text
    assert "Loading models from" not in found.stdout + found.stderr


def test_changed_family_trains_as_with_the_framework_alone_where_the_plan_is_left_to_wanshim(tmp_path: Path) -> None:
    framework = changed("Wan", tmp_path / "framework")
    done = run(job("Wan", tmp_path, "left"), framework, DEVICES="cpu,cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"wanshim: diffsynth.model_split: Wan is left out: {CODE['Wan']} differs" in done.stderr
    assert "split into" not in done.stdout + done.stderr
    assert run(job("Wan", tmp_path, "plain"), framework).returncode == 0
    assert written(tmp_path / "left") == written(tmp_path / "plain")
