"""README's first table: what each framework's user is told to run. The rows of that framework run its line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^\| \*\*(\S+)\*\* \| .* \| `([^`]+)` \|$", re.MULTILINE)


def commands() -> dict[str, str]:
    """Framework, as README writes it, to the command."""
    return dict(LINE.findall((ROOT / "README.md").read_text(encoding="utf-8")))


def blocks() -> list[str]:
    """The lines of README's other blocks of commands, without their comments."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line.partition("#")[0].strip() for kind, block in found if not kind for line in block.splitlines()]


def run(folder: Path, command: str, **variables: str) -> str:
    """Run a command by a shell in `folder`, whose own `bin` comes first on PATH, as a user with this environment would;
    what it prints. There is no GPU and no other variable of wanshim."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANSHIM_")}
    programs = [str(folder / "bin"), str(Path(sys.executable).parent), clean["PATH"]]
    clean |= {"PATH": os.pathsep.join(programs), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH", "")]))  # for `tests`
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**clean, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}"
    return done.stdout
