"""Triton, or None in place of what this torch comes without (CPU builds, some platforms, releases that are too old)."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

from wanshim.core.shared import gpus

__all__ = ["hash_ahead", "libdevice", "tl", "triton"]

_hashing: Thread | None = None

if TYPE_CHECKING:
    triton: Any = None
    tl: Any = None
    libdevice: Any = None
else:
    try:
        import triton
        import triton.language as tl
    except Exception:  # a Triton that is there, and neither for this Python nor for this driver
        triton = tl = None
    try:
        from triton.language.extra import libdevice
    except Exception:
        libdevice = None


def hash_ahead() -> None:
    """Begin, in a thread, what the first kernel of a process waits a second for: Triton hashes its own files, some 400
    MB, to name what it compiled. Once a process; nothing on a machine without a GPU."""
    global _hashing
    if triton is not None and _hashing is None:
        _hashing = Thread(target=_hash, name="wanshim-triton", daemon=True)
        _hashing.start()
        os.register_at_fork(before=_hashing.join)  # a child would have the locks that the thread held


def _hash() -> None:
    if gpus.in_sight(None) == 0:
        return
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):  # of new releases, and of old ones
        if (key := getattr(sys.modules.get(name), "triton_key", None)) is not None:
            with suppress(Exception):  # Triton will say it itself
                key()
            return
