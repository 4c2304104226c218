"""Text for people: one line of an error, and a table. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty: without a compiler's output or the C++ trace behind it;
    the error's type if it has no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def named_line(error: BaseException) -> str:
    """An error in one line, which begins with its type."""
    line, name = first_line(error), type(error).__name__
    return line if line == name else f"{name}: {line}"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Columns that are as wide as their widest cell, indented by two."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
