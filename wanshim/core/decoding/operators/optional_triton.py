"""Triton, or None in place of what this torch comes without (CPU builds, some platforms, releases that are too old)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["libdevice", "tl", "triton"]

if TYPE_CHECKING:
    triton: Any = None
    tl: Any = None
    libdevice: Any = None
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None
    try:
        from triton.language.extra import libdevice
    except ImportError:
        libdevice = None
