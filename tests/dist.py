"""Builds the sdist and, from it, the wheel, and uses each in an empty environment on every Python that is promised.

make dist                          every promised Python that is on PATH; the others are named
make dist PYTHONS="3.10 3.13"      those, and a missing one is a failure

Each environment holds nothing but the archive and its requirements: no framework, no torch. There `wanshim doctor`
has to end with status 0, and the package has to be imported from the environment, whole, with the version built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
PROMISED = re.compile(r'"Programming Language :: Python :: (3\.\d+)"')
USE = """
import sys, wanshim
from pathlib import Path
assert Path(wanshim.__file__).is_relative_to(sys.prefix), wanshim.__file__
assert "torch" not in sys.modules
report = wanshim.activate()
assert {row.verdict for row in report.rows} == {"absent"}, str(report)
wanshim.deactivate()
print(wanshim.__version__)
"""


def promised() -> list[str]:
    return PROMISED.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def version() -> str:
    """As the source has it, which is the only place."""
    text = (ROOT / "wanshim" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]  # type: ignore[index]


def build(source: Path, output: Path) -> tuple[Path, Path]:
    """The sdist of `source`, and the wheel that was built from that sdist."""
    run([sys.executable, "-m", "build", "--installer", "uv", "--outdir", str(output), str(source)])
    names = f"wanshim-{version()}.tar.gz", f"wanshim-{version()}-py3-none-any.whl"
    sdist, wheel = (output / name for name in names)
    assert sdist.is_file(), f"{output} holds {sorted(path.name for path in output.iterdir())}"
    assert wheel.is_file(), f"{output} holds {sorted(path.name for path in output.iterdir())}"
    return sdist, wheel


def use(archive: Path, python: str, environment: Path) -> Path:
    """Install the archive in a new environment and use it there; the environment's folder of programs."""
    uv = [sys.executable, "-m", "uv"]  # pip takes five times as long
    run([*uv, "venv", "-q", "--seed", "-p", python, str(environment)])
    programs = environment / "bin"
    run([*uv, "pip", "install", "-q", "-p", str(programs / "python"), str(archive)])
    said = run([str(programs / "python"), "-c", USE], cwd=environment)
    assert said.split() == [version()], said
    assert version() in run([str(programs / "wanshim"), "--version"], cwd=environment)
    run([str(programs / "wanshim"), "doctor"], cwd=environment)
    return programs


def run(command: Sequence[str], cwd: Path | None = None) -> str:
    """What it prints. The caller's checkout is not on its path, and nothing but wanshim says which releases fit."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "UV_CONSTRAINT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _is_there(python: str) -> bool:
    """A shim of pyenv is on PATH for every version that any of its users has, and runs not all."""
    path = shutil.which(python)
    return path is not None and subprocess.run([path, "-V"], capture_output=True, check=False).returncode == 0


def main(named: Sequence[str]) -> int:
    there = [name for name in named or promised() if _is_there(f"python{name}")]
    absent = [name for name in named or promised() if name not in there]
    if (named and absent) or not there:
        print(f"not on PATH: {', '.join(f'python{name}' for name in absent)}")
        return 1
    shutil.rmtree(DIST, ignore_errors=True)
    archives = build(ROOT, DIST)
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)])
    for name in there:
        for archive in archives:
            with tempfile.TemporaryDirectory(prefix="wanshim-dist-") as folder:
                use(archive, f"python{name}", Path(folder) / "env")
            print(f"Python {name}: {archive.name} installs and works", flush=True)
    if absent:
        print(f"not tried, since not on PATH: {', '.join(f'Python {name}' for name in absent)}")
    print(f"in {DIST}: {', '.join(archive.name for archive in archives)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
