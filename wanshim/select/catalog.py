"""Which frameworks and features there are: every folder and file of the adapter packages, none of them by name.

wanshim's own adapters are found as the folders of `wanshim.adapters`. Others register a package of the same shape
under the entry-point group `wanshim.adapters`: a folder a framework with `FRAMEWORK` in its `__init__.py`, a file a
feature with `FEATURE` in it, or `FEATURES` that share their code, and a compat_matrix.yaml of its own if it likes. A
third party's package is taken whole or, with one warning, not at all: it never takes wanshim's own features with it.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from wanshim.errors import WanshimError
from wanshim.patching.feature import Feature, Framework

GROUP = "wanshim.adapters"
NAMES_A_FEATURE = re.compile(rb"\bFEATURES?\b")


@dataclass(frozen=True)
class Catalog:
    """Everything that can be selected, in the order of frameworks and files."""

    frameworks: dict[str, Framework]
    features: dict[str, Feature]
    matrices: tuple[Path, ...]  # those of third parties; wanshim's own is not listed
    origins: dict[str, str] = field(default_factory=dict)  # feature -> "distribution version" of a third party
    left_out: tuple[str, ...] = ()  # sentences: which package of which distribution was not taken, and why


def discover() -> Catalog:
    """Import every adapter package. Adapters import neither their framework nor torch at the top.

    Raises:
        WanshimError: wanshim's own adapters cannot be imported.
    """
    catalog = _with_package(Catalog({}, {}, ()), GROUP, "")
    for package, distribution in _third_parties():
        try:
            catalog = _with_package(catalog, package, distribution)
        except (Exception, SystemExit) as error:
            reason = str(error) if isinstance(error, WanshimError) else f"{type(error).__name__}: {error}"
            left_out = f"the adapters of {distribution} ({package}) are left out: {reason}"
            catalog = replace(catalog, left_out=(*catalog.left_out, left_out))
            import logging

            logging.getLogger("wanshim").warning("wanshim: %s", left_out)
    return catalog


def _with_package(known: Catalog, name: str, distribution: str) -> Catalog:
    """`known` and what the package offers.

    Raises:
        WanshimError: it claims a framework or a feature that another package offers.
        Exception: whatever importing it raises.
    """
    frameworks, features, matrices = dict(known.frameworks), dict(known.features), known.matrices
    package = importlib.import_module(name)
    for folder in _children(package):
        framework = getattr(folder, "FRAMEWORK", None)
        if framework is not None:
            _claim(frameworks, framework, Framework, name)
        for file in _children(folder, NAMES_A_FEATURE):
            for feature in features_of(file):
                _claim(features, feature, Feature, name)
    new = [feature for feature in features.values() if feature.name not in known.features]
    for feature in new:
        if feature.framework not in frameworks:
            raise WanshimError(f"{feature.name} belongs to no framework", expected="one of " + ", ".join(frameworks))
    origins = known.origins
    if name != GROUP:
        origins = origins | {feature.name: distribution for feature in new}
        matrix = Path(next(iter(package.__path__)), "compat_matrix.yaml")
        matrices += (matrix,) if matrix.is_file() else ()
    return Catalog(frameworks, features, matrices, origins, known.left_out)


def features_of(file: ModuleType) -> tuple[Feature, ...]:
    """Features that a file of an adapter offers: its `FEATURE`, or its `FEATURES`."""
    one = getattr(file, "FEATURE", None)
    return getattr(file, "FEATURES", () if one is None else (one,))


Item = TypeVar("Item", Framework, Feature)


def _claim(taken: dict[str, Item], item: Item, kind: type[Item], package: str) -> None:
    if not isinstance(item, kind):
        raise WanshimError(f"{package} offers a {type(item).__name__}", expected=f"a {kind.__name__}")
    if item.name in taken:
        raise WanshimError(f"{package} offers {item.name!r}, which another adapter package offers too")
    taken[item.name] = item


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
        yield importlib.import_module(f"{package.__name__}.{name}")


def _third_parties() -> list[tuple[str, str]]:
    """Packages registered under the group, with their distributions. importlib.metadata costs more than all the rest
    of `activate`, so it is asked only where some installed distribution mentions the group at all."""
    if not any(_mentions_group(Path(path)) for path in sys.path):
        return []
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP)
    return sorted((e.value, f"{e.dist.name} {e.dist.version}" if e.dist is not None else e.name) for e in found)


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
