"""Programs started with `wanshim run --` as a user would start them, and what each of their processes wrote down."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def tool(name: str) -> str:
    """A console script of the environment that the tests run in."""
    path = Path(sys.executable).with_name(name)
    assert path.is_file(), f"{name} is not installed beside {sys.executable}"
    return str(path)


def light_diffsynth(folder: Path) -> None:
    """A package `diffsynth` in `folder` of the installed one's files, of which importing one module imports no other:
    what `diffsynth` and `diffsynth.core` import by themselves takes ten seconds a process."""
    spec = importlib.util.find_spec("diffsynth")
    assert spec is not None
    assert spec.origin is not None
    for package in ("diffsynth", "diffsynth/core"):
        installed, light = Path(spec.origin).parents[1] / package, folder / package
        if not installed.is_dir():  # DiffSynth's early releases have no core
            continue
        light.unlink(missing_ok=True)
        light.mkdir()
        for path in installed.iterdir():
            (light / path.name).symlink_to(path)
        (light / "__init__.py").unlink()
        (light / "__init__.py").touch()


def answers_under_run(
    folder: Path, features: str, *command: str, prefix: bool = True, timeout_s: float = 240
) -> list[dict[str, Any]]:
    """Run a command in `folder` and return what its processes wrote to `answers/*.json` there.

    Args:
        prefix: False leaves `wanshim run --` out and sets WANSHIM_FEATURES all the same.
    """
    (folder / "answers").mkdir()
    start = [sys.executable, "-m", "wanshim", "run", "-f", features, "--"] if prefix else []
    environment = {**os.environ, "WANSHIM_FEATURES": features, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]  # the workers import from `tests`
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [*start, *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return [json.loads(path.read_text()) for path in sorted((folder / "answers").glob("*.json"))]
