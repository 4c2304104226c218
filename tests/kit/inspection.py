"""What stands at a seam, found by looking at the framework's own namespaces and not at wanshim's books."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from wanshim.patching import Feature
from wanshim.patching.transaction import owner_of, state_of
from wanshim.select import catalog


def resolve(reference: str) -> Any:
    """The object at `package.module:name`."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def feature(name: str) -> Feature:
    return catalog.discover().features[name]


def standing(target: str) -> Any:
    """What the owner's namespace holds at the target, descriptor included; None where it holds nothing."""
    owner, name = owner_of(target)
    return None if owner is None else vars(owner).get(name)


def namespaces(feature: Feature, module: str | None = None) -> dict[str, dict[str, Any]]:
    """A shallow copy of every loaded module and class that the feature's seams live in; of one module's, if named."""
    result: dict[str, dict[str, Any]] = {}
    for seam in feature.seams:
        owner, _ = owner_of(seam.target)
        if owner is not None and module in (None, seam.module):
            result[seam.module] = dict(vars(sys.modules[seam.module]))
            if isinstance(owner, type):
                result[seam.target.rpartition(".")[0]] = dict(vars(owner))
    return result


def layers(value: Any) -> int:
    """How many replacements of wanshim lie on one another."""
    count, seen = 0, set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        count += state_of(value) is not None
        value = getattr(getattr(value, "__func__", value), "__wrapped__", None)
    return count


def differences(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """The names that are not the same object as before, but for those that Python itself binds."""
    missing = object()
    return sorted(
        f"{place}.{name}"
        for place, names in before.items()
        for name in names.keys() | after.get(place, {}).keys()
        if not _is_pythons(place, name) and names.get(name, missing) is not after.get(place, {}).get(name, missing)
    )


def _is_pythons(place: str, name: str) -> bool:
    """Every dunder of a module; of a class those alone that are bound at first use."""
    if ":" in place:
        return name in ("__annotations__", "__annotations_cache__", "__slotnames__")
    return name.startswith("__")
