"""The wheel, installed in an empty environment, is whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist and of the wheel that was built from that sdist. They are built from a copy, so that no
    build folder is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(source)],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def test_wheel_holds_adapters_once_and_the_matrix(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "wanshim/compat_matrix.yaml" in names
    assert "wanshim/boot/path/sitecustomize.py" in names
    assert len(names) == len(set(names))
    adapters = {name.removeprefix("wanshim/") for name in names if name.startswith("wanshim/adapters/")}
    assert adapters == {path.relative_to(ROOT).as_posix() for path in (ROOT / "adapters").rglob("*.py")}
    assert not [name for name in names if name.startswith(("adapters/", "tests/"))]


def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """The monitor's page among them: a wheel without it serves an empty answer."""
    command = ["git", "ls-files", "wanshim", "adapters"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = {
        name if name.startswith("wanshim/") else f"wanshim/{name}" for name in tracked if (ROOT / name).is_file()
    }
    assert "wanshim/monitor/static/index.html" in expected
    assert expected <= set(zipfile.ZipFile(wheel).namelist())


def test_sdist_holds_each_adapter_once(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        files = [member.name for member in sdist if member.isfile() or member.issym()]
    assert len([name for name in files if name.endswith("/adapters/diffsynth/patchify.py")]) == 1
    assert len(files) == len(set(files))


def test_wheel_in_an_empty_environment_runs_doctor(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True, cwd=tmp_path, env=environment)
    result = subprocess.run(
        [str(tmp_path / "env" / "bin" / "wanshim"), "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert {row["verdict"] for row in rows if row["framework"] != "torch"} == {"absent"}
    assert "diffsynth.patchify" in {row["feature"] for row in rows}
