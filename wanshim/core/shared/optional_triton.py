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
    except Exception:  # a Triton that is there, and neither for this Python nor for this driver
        triton = tl = None
    try:
        from triton.language.extra import libdevice
    except Exception:
        libdevice = None
