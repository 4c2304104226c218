"""What a user sets to do something, for the hints of errors: core code knows no variable and no flag."""

from __future__ import annotations

HINTS = {
    "pipeline_off": "Switch the pipeline off with WANSHIM_PIPELINE=0",
}


def hint(name: str) -> str:
    """The hint of this name."""
    return HINTS[name]
