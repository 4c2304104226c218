"""How an adapter begins to record: where the log goes, and what happens when it cannot be opened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from wanshim.core.training.recorder import RunRecorder

log = logging.getLogger("wanshim")

DEFAULT_FOLDER = "training_logs"  # in the run's output folder


def log_folder(output_path: str | Path, chosen: str | None) -> Path:
    """`chosen` (WANSHIM_PROGRESS_DIR), else `training_logs` in the output folder."""
    return Path(chosen) if chosen else Path(output_path) / DEFAULT_FOLDER


def open_recorder(
    make: Callable[[], RunRecorder], *, feature: str, strict: bool, note: Callable[[str], object]
) -> RunRecorder | None:
    """The recorder, or None: a run that cannot be recorded goes on without.

    Args:
        make: opens the recorder; may raise anything.
        feature: named in the warning.
        strict: raise what `make` raises.
        note: takes a line for the report.
    """
    try:
        recorder = make()
    except Exception as error:
        if strict:
            raise
        note(f"not recorded: {error}")
        log.warning("wanshim: %s: not recorded: %s", feature, error)
        return None
    note(f"rank {recorder.rank} on {', '.join(recorder.devices)} logs to {recorder.folder}")
    return recorder
