"""The one way to attach something to a foreign object and to take it off again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

_ABSENT = object()


class Undo:
    """A list of what was attached, with a function that takes each off. `remove()` calls them, the last first.

    As a context manager it removes at the end of the block, also after an error; `failed` tells it apart.
    """

    failed = False

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        """Call `step` when the rest is taken back."""
        self._steps.append(step)

    def set(self, owner: Any, attributes: Mapping[str, Any], *, keep_foreign: bool = False) -> None:
        """Set attributes in the object's own namespace, past a `__setattr__` of its class.

        Args:
            keep_foreign: a value that someone else has set in the place by then stays there.
        """
        for name, value in attributes.items():
            before = vars(owner).get(name, _ABSENT)
            vars(owner)[name] = value
            self._steps.append(partial(_restore, vars(owner), name, before, value if keep_foreign else _ABSENT))

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `make(the original)`."""
        self.set(owner, {name: make(getattr(owner, name))})

    def set_variable(self, name: str, value: str, *, unless: Iterable[str] = ()) -> None:
        """Set an environment variable, unless one of these is set."""
        variables = os.environ  # noqa: TID251 - set for a library that knows no other way; not read
        before = variables.get(name)
        if any(each in variables for each in unless):
            return
        variables[name] = value
        self._steps.append(lambda: variables.pop(name, None) if before is None else variables.update({name: before}))

    def run_steps(self) -> None:
        """Run every step, the last first, and keep them: for a caller who then restores what they changed."""
        for step in reversed(self._steps):
            step()

    def __bool__(self) -> bool:
        return bool(self._steps)

    def remove(self) -> None:
        """Take everything back. A second call does nothing.

        Raises:
            Exception: what the first failing step raised, after all others have run.
        """
        errors: list[BaseException] = []
        while self._steps:
            try:
                self._steps.pop()()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.failed = kind is not None
        self.remove()


def _restore(namespace: dict[str, Any], name: str, before: object, only_over: object) -> None:
    if only_over is not _ABSENT and namespace.get(name) is not only_over:
        return
    if before is _ABSENT:
        namespace.pop(name, None)
    else:
        namespace[name] = before
