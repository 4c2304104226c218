"""Which machine this is."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine() -> str:
    """`host/boot`: the same for the processes that share this host's memory and clock, and for no others.

    A host name alone does not say it: machines of one image share it, and a reboot keeps it. Containers of one
    host share the boot. On a system without a boot id the second part is empty.
    """
    return f"{socket.gethostname()}/{_boot_id()}"


@cache
def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
