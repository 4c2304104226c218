"""What every activation reads and parses, read once in a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest


def read_once(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone: most tests activate, and each would parse the same files of a framework and the same
    matrix again."""
    from wanshim.patching import probe
    from wanshim.select import matrix

    load, own = matrix.load, matrix.path_of_own_matrix()
    load_own = cache(load)

    def load_once(path: Path | None = None) -> matrix.Matrix:
        path = path or matrix.path_of_own_matrix()
        return load_own(own) if path == own else load(path)

    patch.setattr(matrix, "load", load_once)
    patch.setattr(probe, "_parse", cache(probe._parse))
    patch.setattr(probe, "fingerprint", cache(probe.fingerprint))
