"""The one import hook: calls back when a watched module has been imported.

One finder for all watched names, first on sys.meta_path. It asks the finders behind it rather than
`importlib.util.find_spec`, which takes import locks again and can deadlock with a module that starts a
thread (DataDog/dd-trace-py#17742), and it hands the module its own loader back before running it.

Finder and loader only look like those of importlib.abc: importing that module costs a third of `activate`.
"""

from __future__ import annotations

import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class _Loader:
    """Runs the real loader, then the callback. A callback raises only under strict: see `activation`."""

    def __init__(self, loader: Any, callback: Callback) -> None:
        self._loader = loader
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance asks: whoever looks at a spec sees the real loader
        return type(self._loader)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback(module)


class ImportHook:
    """Watches module names. Nothing is on sys.meta_path while nothing is watched."""

    def __init__(self) -> None:
        self._callbacks: dict[str, Callback] = {}
        self._searching = threading.local()

    def watch(self, modules: Iterable[str], callback: Callback) -> None:
        """These in place of those before, in one step: another thread may import one of them right now."""
        self._callbacks = dict.fromkeys(modules, callback)
        if not self._callbacks:
            self.clear()
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def clear(self) -> None:
        self._callbacks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        callback = self._callbacks.get(fullname)
        if callback is None or fullname in vars(self._searching):
            return None
        vars(self._searching)[fullname] = True
        try:
            spec = self._ask_the_others(fullname, path, target)
        finally:
            del vars(self._searching)[fullname]
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, callback)  # type: ignore[assignment]
        return spec

    def _ask_the_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in list(sys.meta_path):
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None:
                return spec  # type: ignore[no-any-return]
        return None
