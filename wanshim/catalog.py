"""Which frameworks and features there are: every folder and file of the adapter packages, none of them by name.

wanshim's own adapters are found as the folders of `wanshim.adapters`. Others register a package of the same
shape under the entry-point group `wanshim.adapters`: a folder a framework with `FRAMEWORK` in its
`__init__.py`, a file a feature with `FEATURE` in it, and a compat_matrix.yaml of its own if it likes.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from wanshim.errors import SeamConflict, WanshimError
from wanshim.patching.feature import Feature, Framework

GROUP = "wanshim.adapters"
NAMES_A_FEATURE = re.compile(rb"\bFEATURE\b")


@dataclass(frozen=True)
class Catalog:
    """Everything that can be selected, in the order of frameworks and files."""

    frameworks: dict[str, Framework]
    features: dict[str, Feature]
    matrices: tuple[Path, ...]  # those of third parties; wanshim's own is not listed


def discover() -> Catalog:
    """Import every adapter package. Adapters import neither their framework nor torch at the top.

    Raises:
        SeamConflict: two packages claim one framework or feature.
        WanshimError: a third party's package cannot be imported, or gives a feature to a framework nobody offers.
    """
    frameworks: dict[str, Framework] = {}
    features: dict[str, Feature] = {}
    matrices: list[Path] = []
    for name in (GROUP, *_third_parties()):
        package = _imported(name)
        for folder in _children(package):
            framework = getattr(folder, "FRAMEWORK", None)
            if framework is not None:
                _claim(frameworks, framework.name, framework, name)
            for file in _children(folder, NAMES_A_FEATURE):
                feature = getattr(file, "FEATURE", None)
                if feature is not None:
                    _claim(features, feature.name, feature, name)
        matrix = Path(next(iter(package.__path__)), "compat_matrix.yaml")
        if name != GROUP and matrix.is_file():
            matrices.append(matrix)
    for feature in features.values():
        if feature.framework not in frameworks:
            raise WanshimError(f"{feature.name} belongs to no framework", expected="one of " + ", ".join(frameworks))
    return Catalog(frameworks, features, tuple(matrices))


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise WanshimError(
            f"adapter package {name!r} cannot be imported: {type(error).__name__}: {error}",
            hint="Update or uninstall the distribution that registers it",
        ) from error


Item = TypeVar("Item", Framework, Feature)


def _claim(taken: dict[str, Item], name: str, item: Item, package: str) -> None:
    if name in taken:
        raise SeamConflict(f"{package} offers {name!r}, which another adapter package offers too")
    taken[name] = item


def _children(package: ModuleType, saying: re.Pattern[bytes] | None = None) -> Iterator[ModuleType]:
    """The modules in a package whose text has `saying`, or its packages and modules without it. What a feature only
    uses is imported by that feature."""
    names: set[str] = set()
    for location in getattr(package, "__path__", ()):
        for entry in os.scandir(location):
            is_package = saying is None and entry.is_dir() and Path(entry.path, "__init__.py").is_file()
            is_file = entry.name.endswith(".py") and entry.name != "__init__.py"
            if is_package or (is_file and (saying is None or saying.search(Path(entry.path).read_bytes()))):
                names.add(entry.name.removesuffix(".py"))
    for name in sorted(names):
        yield _imported(f"{package.__name__}.{name}")


def _third_parties() -> list[str]:
    """Packages registered under the group. importlib.metadata costs more than all the rest of `activate`,
    so it is asked only where some installed distribution mentions the group at all."""
    if not any(_mentions_group(Path(path)) for path in sys.path):
        return []
    from importlib.metadata import entry_points

    return sorted(entry.value for entry in entry_points(group=GROUP))


def _mentions_group(site: Path) -> bool:
    try:
        entries = [e for e in os.scandir(site) if e.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return False
    for entry in entries:
        try:
            if f"[{GROUP}]".encode() in Path(entry.path, "entry_points.txt").read_bytes():
                return True
        except OSError:
            continue
    return False
