"""The one way in which a call stays with the framework: it computes whatever of ours cannot be done.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from wanshim.core.shared.text import first_line, named_line
from wanshim.errors import WanshimError

_computes: ContextVar[bool] = ContextVar("the framework computes", default=False)


class Fallback(Exception):
    """A call stays with the framework by a rule of ours; the text says which."""


def framework_computes() -> bool:
    """Whether this call is one for the framework's own result. A replaced method then calls the original."""
    return _computes.get()


@contextmanager
def by_framework() -> Iterator[None]:
    """Inside, replaced methods call the originals."""
    token = _computes.set(True)
    try:
        yield
    finally:
        _computes.reset(token)


def cause_of(error: BaseException) -> str:
    """An error in one line. Errors of ours are sentences without the name of their type."""
    return first_line(error) if isinstance(error, (Fallback, WanshimError)) else named_line(error)


def or_framework(
    method: Callable[..., Any],
    original: Callable[..., Any],
    on_fallback: Callable[[str], None],
    *,
    strict: Callable[[], bool] = lambda: False,
    on_error: Callable[[], None] = lambda: None,
) -> Callable[..., Any]:
    """`method`, and `original` in each call that `method` cannot compute, for whatever cause.

    An error of the user's own is raised by `original` too. What `original` would hide is raised: errors whose
    `left_to_framework` is false, and interrupts.

    Args:
        method: takes the arguments of `original`; it has changed nothing that the user sees when it raises.
        on_fallback: called with the cause in one line, before `original`, in each such call.
        strict: whether a failure is raised. A `Fallback` is none: it is left to the framework all the same.
        on_error: called before an error of `method` is raised.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if framework_computes():
            return original(*args, **kwargs)
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if not getattr(error, "left_to_framework", True) or (strict() and not isinstance(error, Fallback)):
                on_error()
                raise
            import logging  # needed by few: not at activation
            import traceback

            reason = cause_of(error)
            if not isinstance(error, Fallback):
                logging.getLogger("wanshim").debug("left to the framework", exc_info=True)
            traceback.clear_frames(error.__traceback__)  # lets go of the memory that the failed call holds
        except BaseException:
            on_error()
            raise
        on_fallback(reason)
        return original(*args, **kwargs)

    return call
