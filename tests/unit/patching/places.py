"""A module to patch, and replacements for it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from wanshim.patching import Kind, Seam, SeamState
from wanshim.patching.transaction import owner_of

LEAF = """
def plain(x):
    "The original's docstring."
    return ("original", x)

class Model:
    def forward(self, x):
        return ("original", x)

    @staticmethod
    def static(x):
        return ("original", x)

    @classmethod
    def of_class(cls, x):
        return (cls.__name__, "original", x)

    @property
    def size(self):
        return 1

class Child(Model):
    pass

model = Model()
ALLOWED = ["a"]
COUNT = 1
"""


def prefixing(original: Any, seam: SeamState) -> Callable[..., Any]:
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not seam.enter():
            return original(*args, **kwargs)
        return ("ours", *original(*args, **kwargs))

    return replacement


def state(
    name: str, replace: Callable[[Any, SeamState], Any] = prefixing, kind: Kind = Kind.CLOSURE, **options: Any
) -> SeamState:
    seam = Seam(f"fakewan.leaf:{name}", replace, why="w", upstream="u", remove_when="r", kind=kind, **options)
    return SeamState(seam)


def place(leaf: types.ModuleType, name: str) -> tuple[Any, str]:
    owner, last = owner_of(f"fakewan.leaf:{name}")
    assert owner is not None
    return owner, last


def foreign(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ("foreign", *function(*args, **kwargs))

    return wrapper
