"""The state of the checkout that a record comes from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Untracked files count: Python imports them like any other. Records do not: one run may write several.
DESCRIBE = ("describe", "--always", "--abbrev=40", "--exclude=*")
CHANGES = ("status", "--porcelain", "--", ".", ":!benchmarks/results")


def state() -> dict[str, Any]:
    """`commit`, and `clean`: whether the files were those of the commit. Both are None where neither git nor
    WANSHIM_COMMIT knows.

    A machine that has the files alone takes WANSHIM_COMMIT, which `python benchmarks/checkout.py` prints in the
    checkout: the full hash, with `-dirty` behind it where a file differs from the commit.
    """
    described = os.environ.get("WANSHIM_COMMIT") or describe()
    if not described:
        return {"commit": None, "clean": None}
    return {"commit": described.removesuffix("-dirty"), "clean": not described.endswith("-dirty")}


def describe() -> str:
    """The commit, with `-dirty` behind it where a file differs; "" outside a checkout."""
    commit = _git(*DESCRIBE)
    return f"{commit}-dirty" if commit and _git(*CHANGES) else commit


def _git(*arguments: str) -> str:
    try:
        found = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # git is not installed
        return ""
    return found.stdout.strip()


if __name__ == "__main__":
    print(describe())
