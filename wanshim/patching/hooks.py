"""The one import hook: calls back when a watched module has been imported.

One finder for all watched names, first on sys.meta_path. It asks the finders behind it rather than
`importlib.util.find_spec`, which takes import locks again and can deadlock with a module that starts a
thread (DataDog/dd-trace-py#17742), and it hands the module its own loader back before running it. A module whose
import began before the finder was there calls back when its import ends: see `when_imported`.

Finder and loader only look like those of importlib.abc: importing that module costs a third of `activate`.
"""

from __future__ import annotations

import importlib.machinery
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]
SEARCH_WAIT_S = 1.0
_WAITING = "_wanshim_waiting"  # in a spec: who is still to be called back when the module has been imported, or None


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
            vars(module.__spec__)[_WAITING] = None  # for this call, and no other
        self._loader.exec_module(module)
        self._callback(module)


def is_initializing(module: ModuleType) -> bool:
    """Whether its top level is still running, in another thread or further up in this one."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def when_imported(module: ModuleType, callback: Callback) -> bool:
    """Call back once, at the end of the import that `is_initializing` tells of; not if that import fails.

    The last thing that `importlib._bootstrap._load_unlocked` does is to set `_initializing` of the spec to False,
    before it releases the lock of the module. Until then the spec is of a class of ours that sees it. It calls back
    first: other threads wait for the lock only while `_initializing` is set.

    Returns:
        False where the import ended just now: then nobody is called back.
    """
    spec = module.__spec__
    if spec is None or _WAITING in vars(spec):
        return True
    plain = type(spec)

    def end(spec: importlib.machinery.ModuleSpec, value: bool) -> None:
        try:
            if not value:
                _call_back(spec)
        finally:
            vars(spec)["_initializing"] = value
            spec.__class__ = plain

    vars(spec)[_WAITING] = callback
    spec.__class__ = type(plain.__name__, (plain,), {"_initializing": property(_read, end)})
    if is_initializing(module):
        return True
    spec.__class__ = plain
    del vars(spec)[_WAITING]
    return False


def _read(spec: importlib.machinery.ModuleSpec) -> bool:
    return bool(vars(spec).get("_initializing", False))


def _call_back(spec: importlib.machinery.ModuleSpec) -> None:
    callback, vars(spec)[_WAITING] = vars(spec)[_WAITING], None  # and not again
    module = sys.modules.get(spec.name)
    if callback is None or module is None:
        return
    try:
        callback(module)
    except BaseException:
        sys.modules.pop(spec.name, None)  # as where the loader itself raises
        raise


def _may_pass(name: str) -> bool:
    """Whether another thread may be between its search for this module, without our finder, and the first line."""
    locks = getattr(importlib._bootstrap, "_module_locks", {})  # type: ignore[attr-defined]
    lock = locks.get(name, lambda: None)()  # the registry holds weak references
    is_foreign = getattr(lock, "owner", None) not in (None, threading.get_ident())
    package = name.rpartition(".")[0]
    return is_foreign and name not in sys.modules and (not package or package in sys.modules)


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
        # Searches take well below a millisecond; what lasts longer is an import of the package, whose modules are
        # searched for later, with our finder.
        end = time.monotonic() + SEARCH_WAIT_S
        while any(map(_may_pass, list(self._callbacks))) and time.monotonic() < end:
            time.sleep(0.001)

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
