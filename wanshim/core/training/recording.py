"""The begin and the end of a log for an adapter: its place, what happens when it cannot be opened, how it closes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from wanshim.core.training.progress_display import display_for
from wanshim.core.training.recorder import RunRecorder, TrainingRun

log = logging.getLogger("wanshim")

DEFAULT_FOLDER = "training_logs"  # in the run's output folder
NO_STEP = "not recorded: no step ran"
ERROR_CHARACTERS = 500  # of an error in the log
RESUMES_AT = "wanshim_resumes_at"  # of an exception that ends a run whose state is saved: the optimizer step


def log_folder(output_path: str | Path, chosen: str | None) -> Path:
    """`chosen`, else `training_logs` in the output folder."""
    return Path(chosen) if chosen else Path(output_path) / DEFAULT_FOLDER


def open_recorder(
    describe: Callable[[], tuple[TrainingRun, int, Sequence[str]]],
    *,
    folder: str | None,
    feature: str,
    strict: bool,
    note: Callable[[str], object],
    without_effect: Callable[[str], object],
) -> RunRecorder | None:
    """The recorder, or None: a run that cannot be recorded goes on without. Rank 0 shows the run too.

    Args:
        describe: the run, this process's rank and its devices; may raise anything.
        folder: of all logs; None: in the run's output folder.
        feature: named in the warning.
        strict: raise what `describe` and the opening of the log raise.
        note: takes a line for the report.
        without_effect: takes the line that the run is not recorded.
    """
    try:
        run, rank, devices = describe()
        display = display_for() if rank == 0 else None
        recorder = RunRecorder(log_folder(run.output_path, folder), run, rank, devices, display)
    except Exception as error:
        if strict:
            raise
        without_effect(f"not recorded: {error}")
        log.warning("wanshim: %s: not recorded: %s", feature, error)
        return None
    note(f"rank {recorder.rank} on {', '.join(recorder.devices)} logs to {recorder.folder}")
    return recorder


@contextmanager
def closing(recorder: Callable[[], RunRecorder | None]) -> Iterator[None]:
    """Every way out of the run closes its log: finished, stopped with a state that it resumes from, or failed with the
    error.

    Args:
        recorder: the one opened since, asked at the end; None: the run was not recorded.
    """
    state, error, resumes_at = "failed", None, None
    try:
        yield
        state = "finished"
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"[:ERROR_CHARACTERS]
        resumes_at = getattr(raised, RESUMES_AT, None)
        state = "failed" if resumes_at is None else "stopped"
        raise
    finally:
        opened = recorder()
        if opened is not None:
            opened.close(state, error, resumes_at)
