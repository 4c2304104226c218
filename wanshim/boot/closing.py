"""What a process under `wanshim run` says when it ends: which patches were in, and which of them ran."""

from __future__ import annotations

import atexit
import sys

from wanshim import settings
from wanshim.patching.state import State

SILENT = (State.REGISTERED.value, State.ABSENT.value, State.OFF.value)


def print_report_at_exit() -> None:
    """Arrange for the report of this process, unless another local rank prints it or none was asked for."""
    read = settings.read()
    if read.report and read.local_rank == 0 and not read.disable:
        atexit.register(_print)


def _print() -> None:
    """Nothing to say where no selected framework was imported: launchers and helpers stay quiet."""
    import wanshim

    for row in wanshim.report().selected:
        framework = row.feature.partition(".")[0]
        native = row.state == State.NATIVE.value
        if row.state in SILENT or (native and framework not in sys.modules):  # native is known before the import
            continue
        origin = f" from {row.origin}" if row.origin else ""
        print(f"wanshim: {row.feature}{origin} {row.outcome} ({row.reason})", file=sys.stderr)
        for note in row.notes:
            print("  " + note.replace("\n", "\n  "), file=sys.stderr)
