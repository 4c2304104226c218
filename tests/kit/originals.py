"""The framework's own objects, kept as each module comes out of its import and before wanshim sees it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from tests.kit.inspection import namespaces
from wanshim.patching import Feature
from wanshim.patching.transaction import state_of


class Originals:
    """What a feature's modules and classes held before any patch, to compare by identity.

    A finder of its own on sys.meta_path, which shares no code with wanshim's hook. It has to be there before wanshim is
    activated for the first time: wanshim's hook puts itself in front, and asks this one for the loader that it wraps.
    """

    def __init__(self, feature: Feature) -> None:
        self.feature = feature
        self.kept = namespaces(feature)
        self._waiting = {seam.module for seam in feature.seams} - sys.modules.keys()
        sys.meta_path.insert(0, self)  # type: ignore[arg-type] # finders are asked, not typed

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # type: ignore[arg-type]
        specs = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._keep_after(spec.loader)
        return spec

    def _keep_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for place, names in namespaces(self.feature, module.__name__).items():
                self.kept[place] = {name: self._below(value) for name, value in names.items()}

        loader.exec_module = exec_module

    def _below(self, value: Any) -> Any:
        """What a module took from another by `from other import name`, which wanshim had patched already."""
        state = state_of(value) if isinstance(value, FunctionType) else None
        return value if state is None else self.kept[state.seam.module][state.seam.qualname]
