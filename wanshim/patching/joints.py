"""What a seam replaces on living objects for the length of one call."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Joints:
    """Attributes of living objects, replaced until the end of a `with` block."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `make(the original)`."""
        had, before, original = name in vars(owner), vars(owner).get(name), getattr(owner, name)
        vars(owner)[name] = make(original)
        self._undo.append(lambda: vars(owner).update({name: before}) if had else vars(owner).pop(name, None))

    def set_variable(self, name: str, value: str) -> None:
        """An environment variable, likewise."""
        variables = os.environ  # noqa: TID251 - set for accelerate, which knows no other way; not read
        before = variables.get(name)
        variables[name] = value
        self._undo.append(lambda: variables.pop(name, None) if before is None else variables.update({name: before}))

    def at_end(self, act: Callable[[], object]) -> None:
        self._undo.append(act)

    def __enter__(self) -> Joints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._undo:
            self._undo.pop()()
