"""Wheels, by the user's own package installer and index settings. Nothing is built, installed or imported."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.version import Version

from tools.drift.unavailable import ReleaseUnavailable

# A release that needs another Python, or that was never made for this platform, can still be read.
OPTIONS = ("--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--disable-pip-version-check", "--quiet")


def fetch(requirement: str, folder: Path) -> Path:
    """Download the wheel that fits `requirement` (`name`, `name==version`) into a folder of its own.

    Raises:
        ReleaseUnavailable: there is no pip and no uv, or the index has no wheel for it.
    """
    target = folder / requirement.replace("=", "-")
    target.mkdir(parents=True, exist_ok=True)
    ready = sorted(target.glob("*.whl"))
    if ready:
        return ready[0]
    result = subprocess.run(
        [*_pip(), "download", *OPTIONS, "--dest", str(target), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(target.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise ReleaseUnavailable(
            f"{requirement} cannot be downloaded: {lines[-1].removeprefix('ERROR: ')}",
            hint="Check the name, the version and your index settings, or give the wheel with --wheel FILE",
        )
    return wheels[0]


def versions(distribution: str) -> list[Version]:
    """The releases that the index has of a distribution, ascending: pre-releases too, yanked ones not.

    Raises:
        ReleaseUnavailable: there is no pip and no uv, or the index knows no such distribution.
    """
    command = [*_pip(), "index", "versions", "--pre", "--ignore-requires-python", "--disable-pip-version-check"]
    result = subprocess.run([*command, distribution], capture_output=True, text=True, check=False)
    listed = re.search(r"^Available versions: (.+)$", result.stdout, re.MULTILINE)
    if result.returncode or listed is None:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip lists none"]
        raise ReleaseUnavailable(
            f"the releases of {distribution} cannot be listed: {lines[-1].removeprefix('ERROR: ')}",
            hint="Check your index settings, and that `pip index versions` works (pip 21.2 or newer)",
        )
    return sorted(Version(text.strip()) for text in listed[1].split(","))


def _pip() -> list[str]:
    # importlib.util.find_spec would let setuptools take this process for pip, and fail at its own import from then on.
    if PathFinder.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if shutil.which("uv"):
        return ["uv", "tool", "run", "--quiet", "pip"]
    raise ReleaseUnavailable(
        "neither pip nor uv is installed", hint="Install one of them, or give wheels with --wheel FILE"
    )
