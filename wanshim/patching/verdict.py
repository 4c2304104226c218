"""The five answers to "is this feature available here?"."""

from __future__ import annotations

from enum import Enum


class Verdict(str, Enum):
    PATCH = "patch"  # the seams fit
    NATIVE = "native"  # upstream has the ability: step aside
    REFUSE = "refuse"  # known not to work, or the code is not the code we know
    UNKNOWN = "unknown"  # no row for this version, but the code is one we know: patch, with one warning
    ABSENT = "absent"  # the framework, or the part of it that the feature fixes, is not there
