"""The sdist and the wheel, each installed in an empty environment, are whole."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import dist
from wanshim.select import matrix

ROOT = Path(__file__).parent.parent.parent


def copy_of_checkout(target: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name, follow_symlinks=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist and of the wheel that was built from that sdist. They are built from a copy, so that no
    build folder is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_of_checkout(folder / "source")
    dist.build(folder / "source", folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_adapters_once_and_the_matrix(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "wanshim/compat_matrix.json" in names
    assert "wanshim/launch/boot/path/sitecustomize.py" in names
    assert len(names) == len(set(names))
    adapters = {name.removeprefix("wanshim/") for name in names if name.startswith("wanshim/adapters/")}
    assert adapters == {path.relative_to(ROOT).as_posix() for path in (ROOT / "adapters").rglob("*.py")}
    assert not [name for name in names if name.startswith(("adapters/", "tests/", "tools/"))]


@pytest.mark.slow
def test_matrix_of_the_wheel_is_that_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    built = zipfile.ZipFile(wheel).extract("wanshim/compat_matrix.json", tmp_path)
    assert matrix.load(Path(built)) == matrix.load(ROOT / matrix.NAME)


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """The monitor's page among them: a wheel without it serves an empty answer."""
    command = ["git", "ls-files", "wanshim", "adapters"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = {
        name if name.startswith("wanshim/") else f"wanshim/{name}" for name in tracked if (ROOT / name).is_file()
    }
    assert "wanshim/monitor/static/index.html" in expected
    assert expected <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_sdist_holds_each_adapter_once(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        files = [member.name for member in sdist if member.isfile() or member.issym()]
    assert len([name for name in files if name.endswith("/adapters/diffsynth/patchify.py")]) == 1
    assert len(files) == len(set(files))
    assert not [name for name in files if "/tests/" in name]  # they read the checkout: documents, records and git


def test_checkout_without_symbolic_links_builds_nothing_and_says_why(tmp_path: Path) -> None:
    """As git leaves it under core.symlinks=false: the link is a file that holds its target."""
    copy_of_checkout(tmp_path / "source")
    link = tmp_path / "source" / "wanshim" / "adapters"
    link.unlink()
    link.write_text("../adapters")
    with pytest.raises(AssertionError, match="wanshim/adapters is not a link to adapters/ in this checkout"):
        dist.build(tmp_path / "source", tmp_path)
    assert not [*tmp_path.glob("*.whl"), *tmp_path.glob("*.tar.gz")]


def test_file_that_was_renamed_since_the_last_build_of_a_checkout_is_not_built_again(tmp_path: Path) -> None:
    """`pip install .` leaves its build folder in the checkout."""
    copy_of_checkout(tmp_path / "source")
    old = tmp_path / "source" / "build" / "lib" / "wanshim" / "adapters" / "diffsynth" / "patches.py"
    old.parent.mkdir(parents=True)
    shutil.copy(ROOT / "adapters" / "diffsynth" / "patchify.py", old)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    dist.run([*build, str(tmp_path / "source")])
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert "wanshim/adapters/diffsynth/patchify.py" in names
    assert "wanshim/adapters/diffsynth/patches.py" not in names


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", [pytest.param("*.whl", id="wheel"), pytest.param("*.tar.gz", id="sdist", marks=pytest.mark.sweep)]
)
def test_archive_in_an_empty_environment_works_and_finds_no_framework(
    built: Path, tmp_path: Path, pattern: str
) -> None:
    """On the other Pythons: `make dist`."""
    programs = dist.use(next(built.glob(pattern)), sys.executable, tmp_path / "env")
    rows = json.loads(dist.run([str(programs / "wanshim"), "doctor", "--json"], cwd=tmp_path))["rows"]
    assert {row["verdict"] for row in rows} == {"absent"}
    assert "diffsynth.patchify" in {row["feature"] for row in rows}
    removal = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip uninstall"))
    dist.run([str(programs / "python"), "-m", *removal.split(), "-y"], cwd=tmp_path)
    assert list((tmp_path / "env").rglob("*wanshim*")) == []


def test_version_of_the_citation_and_the_changelog_is_that_of_the_package() -> None:
    """Written in wanshim/__init__.py alone; what cannot read it there is held against it."""
    import wanshim

    assert dist.version() == wanshim.__version__
    assert f"\nversion: {wanshim.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## ([\d.]+\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == wanshim.__version__


def test_pythons_that_are_promised_are_those_that_requirements_admit() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert dist.promised() == ["3.10", "3.11", "3.12", "3.13"]
    assert f'requires-python = ">={dist.promised()[0]}"' in pyproject
