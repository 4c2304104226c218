"""Source in git: which commit a folder is of, and the folder of a commit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tools.drift.unavailable import ReleaseUnavailable
from wanshim.errors import WanshimError


def commit_of(folder: Path) -> str:
    """`repository@commit` of a package's folder; empty where it lies in no git checkout, where that has no `origin`,
    or where a file of the folder is not as the commit has it."""
    try:
        commit, url, prefix, changed = (
            _git(folder, *command).strip()
            for command in (
                ("rev-parse", "HEAD"),
                ("remote", "get-url", "origin"),
                ("rev-parse", "--show-prefix"),
                ("status", "--porcelain", "--", "."),
            )
        )
    except (OSError, WanshimError):
        return ""
    reachable = prefix.rstrip("/") in _places(folder.name)
    return f"{_without_user(url)}@{commit}" if reachable and not changed else ""


def check_out(commit: str, package: str, target: Path) -> Path:
    """The folder of `package` at `repository@commit`, fetched into `target`.

    Raises:
        ReleaseUnavailable: git is not installed, or the repository or the commit cannot be fetched.
        WanshimError: the commit has no such package.
    """
    url, sha = commit.rsplit("@", 1)
    target.mkdir(parents=True, exist_ok=True)
    try:
        _git(target, "init", "--quiet")
        _git(target, "fetch", "--quiet", "--depth", "1", url, sha)
        found = _git(target, "ls-tree", "--name-only", "FETCH_HEAD", *_places(package)).split()
        if not found:
            raise WanshimError(f"{commit} has no package {package}", expected=" or ".join(_places(package)))
        _git(target, "checkout", "--quiet", "FETCH_HEAD", "--", found[0])
    except OSError as error:
        raise ReleaseUnavailable(f"git cannot be run: {error}", hint="Install git") from error
    return target / found[0]


def _places(package: str) -> tuple[str, str]:
    return package, f"src/{package}"


def _without_user(url: str) -> str:
    """A clone's address may hold a user's name and token; a table is for everyone."""
    return re.sub(r"^(https?://)[^/@]*@", r"\1", url)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ReleaseUnavailable(f"{' '.join(command)}: {result.stderr.strip()}", hint="Check network and access")
    return result.stdout
