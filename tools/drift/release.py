"""One release of a framework, opened for reading: a wheel, or a folder of source."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.utils import canonicalize_name

from tools.drift import checkout
from wanshim.errors import WanshimError
from wanshim.patching.feature import Framework
from wanshim.patching.probe import Folder, SourceTree

UNNAMED = "0+folder"


@dataclass(frozen=True)
class Release:
    """The source of one version.

    Args:
        origin: where it was read from.
        words: of a folder, which is nobody's release: where its code comes from.
        commit: of a folder in a clean git checkout: repository@commit.
    """

    framework: str
    version: str
    source: SourceTree
    origin: str
    words: str = ""
    commit: str = ""

    @property
    def named(self) -> bool:
        """Whether its version says where it stands among the rows."""
        return self.version != UNNAMED


def open_wheel(path: Path, frameworks: Iterable[Framework]) -> Release:
    """Open a wheel without unpacking it.

    Raises:
        WanshimError: no wheel, or one of a distribution that no adapter patches.
    """
    try:
        archive = zipfile.Path(path)
        metadata = next(entry / "METADATA" for entry in archive.iterdir() if entry.name.endswith(".dist-info"))
        headers = HeaderParser().parsestr(metadata.read_text(encoding="utf-8"))
    except (OSError, zipfile.BadZipFile, StopIteration, KeyError) as error:
        raise WanshimError(f"{path} cannot be read as a wheel: {error!r}", expected="a .whl file") from error
    framework = framework_of(headers["Name"], frameworks)
    package = archive / framework.name
    if not package.is_dir():
        raise WanshimError(f"{path.name} holds no package {framework.name!r}", expected="the framework's own wheel")
    return Release(framework.name, headers["Version"], SourceTree(framework.name, package), path.name)


def open_folder(path: Path, version: str | None, frameworks: Iterable[Framework]) -> Release:
    """Open a package's own folder, the one that holds its `__init__.py`; its name is the framework's.

    Args:
        version: what it is to be called; None for code of which nobody says.

    Raises:
        WanshimError: no package, or one that no adapter patches.
    """
    path = path.resolve()
    names = [framework.name for framework in frameworks]
    if not (path / "__init__.py").is_file() or path.name not in names:
        raise WanshimError(
            f"{path} is no package of a known framework",
            expected="a folder that holds __init__.py and is named " + " or ".join(names),
        )
    commit = checkout.commit_of(path)
    words = commit or f"a folder of source that was called {version}"
    return Release(path.name, version or UNNAMED, SourceTree(path.name, path), str(path), words, commit)


def framework_of(distribution: str, frameworks: Iterable[Framework]) -> Framework:
    """The framework that a distribution installs; upper and lower case, `-` and `_` are the same."""
    frameworks = list(frameworks)
    for framework in frameworks:
        if canonicalize_name(distribution) == canonicalize_name(framework.distribution):
            return framework
    known = ", ".join(framework.distribution for framework in frameworks)
    raise WanshimError(f"no adapter patches a distribution {distribution!r}", expected=f"one of {known}")


def modules_with(source: SourceTree, text: str) -> Iterator[str]:
    """The modules of a package whose file contains `text`."""
    if source.root is None:
        return
    for module, file in _files(source.root, source.package):
        if text.encode() in file.read_bytes():
            yield module


def _files(folder: Folder, package: str) -> Iterator[tuple[str, Folder]]:
    entries: list[Folder] = list(folder.iterdir())
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(entry, f"{package}.{entry.name}")
        elif entry.name == "__init__.py":
            yield package, entry
        elif entry.name.endswith(".py"):
            yield f"{package}.{entry.name.removesuffix('.py')}", entry
