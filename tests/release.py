"""Holds a tag against the source before it is released: python tests/release.py v0.1.0

The version is written in wanshim/__init__.py. The changelog's newest release has to be that version, with a date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.dist import version  # noqa: E402


def fault(tag: str, changelog: str) -> str:
    """Why the tag cannot be released; "" where it can."""
    if tag != f"v{version()}":
        return f"the tag is {tag} and the source is v{version()}"
    newest = re.search(r"^## (.+)$", changelog, re.MULTILINE)
    if newest is None or not re.fullmatch(rf"{re.escape(version())} \(\d{{4}}-\d\d-\d\d\)", newest[1]):
        found = newest[1] if newest else "nothing"
        return f"CHANGELOG.md begins with {found!r}; expected '{version()} (YYYY-MM-DD)'"
    return ""


if __name__ == "__main__":
    sys.exit(fault(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
