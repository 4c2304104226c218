"""Text for people: one line of an error, and a table. Importing this module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TRACEBACK = re.compile(r"^.*Traceback \(most recent call last\):\n(?:[ \t].*\n)+", re.MULTILINE)


def message(error: BaseException) -> str:
    """An error's message, or its type if it has none. Of an error that a worker process has raised, what follows the
    traceback that its message brings along."""
    return _TRACEBACK.split(str(error))[-1].strip() or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty: without a compiler's output or the C++ trace behind it;
    the error's type if it has no message."""
    return message(error).splitlines()[0].strip()


def named_line(error: BaseException) -> str:
    """An error in one line, which begins with its type."""
    return _named(error, first_line(error))


def named_message(error: BaseException) -> str:
    """All lines of an error's message in one, which begins with its type."""
    return _named(error, " ".join(message(error).split()))


def _named(error: BaseException, text: str) -> str:
    name = type(error).__name__
    return text if text.partition(":")[0] == name else f"{name}: {text}"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Columns that are as wide as their widest cell, indented by two."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
